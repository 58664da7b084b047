"""Dense decoders in the shape of Llama (SmolLM2, Qwen, Mistral, …), spread over a mesh. `parallelize` is the recipe.

The order matters. Tensor parallelism cuts the matrices first, as they come from the file. Activation checkpointing
and the compiler see layers that are already cut. Data parallelism comes last, around everything that is computed:
what it gathers and sums are the parts that the steps before it have left on each rank.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from actors.training import mesh as meshes
from actors.training.config import TrainConfig
from actors.training.layout import Layout, require_divisible
from cluster.errors import ConfigError


def parallelize(
    objective: torch.nn.Module, config: TrainConfig, layout: Layout, device: torch.device, mesh: DeviceMesh | None
) -> torch.nn.Module:
    """`objective` (whose `model` is the decoder), spread over `mesh`; what to call instead of it.

    A mesh of None is one process.
    """
    model: Any = objective.model
    layers = list(model.get_decoder().layers)
    if mesh is not None and layout.tensor > 1:
        share_matrices(model, layers, mesh["tensor"])
    if config.activation_checkpointing:
        checkpoint_activations(model)
    if config.compile:
        compile_layers(layers)
    if mesh is not None and layout.data * layout.context > 1:
        return spread_over_tokens(objective, layers, config, layout, device, mesh)
    return objective.to(device)


def share_matrices(model: Any, layers: Iterable[torch.nn.Module], mesh: DeviceMesh) -> None:
    """Each rank of `mesh` gets some heads of every attention and some columns of every MLP (arXiv:1909.08053).

    Embedding, head and norms stay whole: their ranks compute the same gradient of them.
    """
    facts = model.config
    require_divisible(
        mesh.size(),
        num_attention_heads=facts.num_attention_heads,
        num_key_value_heads=facts.num_key_value_heads,
        intermediate_size=facts.intermediate_size,
    )
    head_dim = getattr(facts, "head_dim", None) or facts.hidden_size // facts.num_attention_heads
    for layer in layers:
        # No rank needs another's copy of the weights: all have read the same file and drawn from the same seed.
        parallelize_module(layer, mesh, _tensor_plan(layer, head_dim), src_data_rank=None)
        for name, part in list(layer.named_modules()):
            if isinstance(part, torch.nn.Dropout) and set(name.split(".")) & _ROWS:
                layer.set_submodule(name, _CutDropout(part.p, mesh))


class _CutDropout(torch.nn.Module):
    """Dropout of an input that is cut by columns: each rank draws for all of them, as one process does, and takes its.

    The others' inputs are whole on every rank, and the ranks' random numbers the same ones.
    """

    def __init__(self, p: float, mesh: DeviceMesh) -> None:
        super().__init__()
        self._p, self._ranks, self._rank = p, mesh.size(), mesh.get_local_rank()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        whole = functional.dropout(x.new_ones(*x.shape[:-1], self._ranks * x.shape[-1]), self._p)
        return x * whole.chunk(self._ranks, dim=-1)[self._rank]


def checkpoint_activations(model: Any) -> None:
    """Keep each layer's input alone for the backward; the rest is computed again."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # What re-entrant checkpointing would need costs the gradient of the embedding's output, which nobody asked for.
    model.disable_input_require_grads()


def compile_layers(layers: Iterable[torch.nn.Module]) -> None:
    """Compile layer by layer: they are alike, so one is compiled and all use it.

    Packed attention on a CPU, whose lengths are data, stays outside (`attention.packed_attention`). So does
    checkpointing, around the compiled layer, since what is inside must be one graph.
    """
    for layer in layers:
        layer.compile()


def spread_over_tokens(
    objective: torch.nn.Module,
    layers: Iterable[torch.nn.Module],
    config: TrainConfig,
    layout: Layout,
    device: torch.device,
    mesh: DeviceMesh,
) -> torch.nn.Module:
    """DDP, FSDP or HSDP over the ranks that see different tokens. Gradients become means over those ranks."""
    strategy = config.parallel.strategy
    if strategy == "ddp" and layout.tensor == 1:
        return DistributedDataParallel(
            objective.to(device),
            process_group=meshes.replicas(mesh).get_group(),
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
        )
    # DDP knows no DTensors: beside tensor parallelism FSDP takes its part, with one shard that is the whole.
    ranks = meshes.shards(mesh, strategy)
    # FSDP itself moves to the device what it has cut: the whole model need not fit there.
    # Embedding and head keep fp32, as the residual stream that begins there.
    for layer in layers:
        fully_shard(layer, mesh=ranks, mp_policy=mixed_precision(config))
    return fully_shard(objective, mesh=ranks)


def mixed_precision(config: TrainConfig) -> MixedPrecisionPolicy:
    """In what FSDP gathers and sums the weights of layers.

    fp32 weights travel in bf16, which is what autocast makes of them anyway. Activations stay as autocast has them,
    so that the numbers are those of DDP.
    """
    if config.adapter.kind == "none" and config.precision == "bf16":
        return MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return MixedPrecisionPolicy()


_COLUMNS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
_ROWS = {"o_proj", "down_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}


def _tensor_plan(layer: torch.nn.Module, head_dim: int) -> dict[str, ParallelStyle]:
    """How each matrix of `layer` is cut, by its name.

    Of a LoRA pair beside it, the half at the cut side is cut the same way and the other half stays whole: B beside
    columns (its input is A's, the same on all ranks), A beside rows (the ranks' sums are added before B).
    """
    plan: dict[str, ParallelStyle] = {}
    for name, part in layer.named_modules():
        names = set(name.split("."))
        if names & _HEAD_NORMS and not list(part.children()):
            if part.weight.numel() != head_dim:
                raise ConfigError(
                    f"{name} of this model is a norm of all heads at once, which ranks with some heads cannot compute.",
                    hint="Use parallel.tensor 1.",
                )
            plan[name] = SequenceParallel(sequence_dim=2, use_local_output=True)  # [B, T, heads, D], by heads
        elif isinstance(part, torch.nn.Linear):
            if names & _COLUMNS:
                if "lora_A" not in names:
                    plan[name] = ColwiseParallel()
            elif names & _ROWS:
                if "lora_B" not in names:
                    plan[name] = RowwiseParallel()
            else:
                raise ConfigError(
                    f"Layers of this model have a matrix {name}, which tensor parallelism does not know how to cut.",
                    hint="Use parallel.tensor 1.",
                )
    return plan
