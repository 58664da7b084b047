"""The experts of a mixture, spread over ranks: each token travels to its experts and back (arXiv:2006.16668).

The ranks of an expert group have different rows and hold different experts. In every mixture layer all-to-all takes
each token to the ranks of the experts that its router has chosen, and brings their answers home; the backward goes
the same ways. No token is dropped and no expert has a capacity: the result is that of one rank with all experts.

Knows the experts modules of transformers (`integrations.moe`, 5.19: one [E, out, in] parameter per matrix) and process
groups. Does not know the rest of a model, nor who averages gradients.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from actors.training import mesh as meshes
from actors.training.layout import Layout
from cluster.errors import ConfigError

DISPATCHED = "flywheel_dispatched"
_MATRICES = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class Group:
    """The ranks over which one module's experts are spread, `experts` on each."""

    ranks: ProcessGroup
    experts: int


def modules(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The experts modules of `model`, one a mixture layer, with their names."""
    for name, part in model.named_modules():
        if all(getattr(getattr(part, matrix, None), "ndim", 0) == 3 for matrix in _MATRICES):
            yield name, part


def mesh_of(layout: Layout, device: torch.device) -> DeviceMesh:
    """(copies, expert): ranks of a row hold all experts together, those of a column hold the same ones.

    Rows are neighbours among the data ranks. Called on every rank, once.
    """
    ranks = torch.arange(layout.world_size).view(-1, layout.expert, layout.context)  # data is copies × expert
    return DeviceMesh(
        device.type, ranks.permute(0, 2, 1).reshape(-1, layout.expert), mesh_dim_names=("copies", "expert")
    )


def refuse_tensor(model: Any, layout: Layout, *, hint: str) -> None:
    """`ConfigError` for a mixture under tensor parallelism, which knows no fused experts."""
    if layout.tensor > 1 and next(modules(model), None):
        raise ConfigError(
            f"parallel.tensor {layout.tensor} does not cut the experts of {model.config.model_type} models.", hint=hint
        )


def spread(model: Any, mesh: DeviceMesh) -> list[Any]:
    """Leave each rank of `mesh` ("expert") its share of every mixture layer's experts; the modules that hold them.

    Their parameters become DTensors, cut along the experts.
    """
    found = [part for _, part in modules(model)]
    kind = model.config.model_type
    if not found:
        raise ConfigError(
            f"parallel.expert {mesh.size()}: {kind} models have no experts that could be spread.",
            hint="Use parallel.expert 1.",
        )
    for part in found:
        if part.has_bias or part.is_transposed or not part.has_gate:
            raise ConfigError(
                f"The experts of {kind} models are no plain gated MLPs, which alone can be spread.",
                hint="Use parallel.expert 1.",
            )
        count = part.gate_up_proj.shape[0]
        if count % mesh.size():
            raise ConfigError(
                f"The {count} experts of this {kind} model cannot be shared by {mesh.size()} ranks.",
                hint="Make parallel.expert a divisor of the number of experts.",
            )
        for name in _MATRICES:
            whole = getattr(part, name)
            mine = whole.detach().chunk(mesh.size())[mesh.get_local_rank()].clone().to(mesh.device_type)
            cut = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
            setattr(part, name, torch.nn.Parameter(cut, requires_grad=whole.requires_grad))
        part.flywheel_group = Group(mesh.get_group(), count // mesh.size())
    model.set_experts_implementation(DISPATCHED)
    return found


# How many tokens go where is data: a compiler would make a program for each.
@torch.compiler.disable
def dispatched_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """[N, H] from [N, H] tokens, whose [N, K] experts and weights the router gives. Signature of transformers.

    Called on every rank of the group, with as many tokens as it has.
    """
    group: Group = module.flywheel_group
    ranks, chosen = group.ranks.size(), top_k_index.shape[1]
    kind = hidden_states.device.type
    tokens = hidden_states.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else hidden_states

    wanted = top_k_index.flatten()
    order = wanted.argsort(stable=True)  # by expert, so by rank
    leaving = torch.bincount(wanted, minlength=ranks * group.experts)
    arriving = torch.empty_like(leaving)
    torch.distributed.all_to_all_single(arriving, leaving, group=group.ranks)
    per_expert = arriving.view(ranks, group.experts)
    # The one wait for the device: the sizes of what is sent, of what comes, and of what each expert gets.
    out_sizes, in_sizes, shares = (
        leaving.view(ranks, group.experts).sum(1).tolist(),
        per_expert.sum(1).tolist(),
        per_expert.sum(0).tolist(),
    )

    arrived = _exchange(tokens[order // chosen], in_sizes, out_sizes, group)
    expert = torch.arange(group.experts, device=arriving.device).repeat(ranks).repeat_interleave(arriving)
    by_expert = expert.argsort(stable=True)  # they come by rank, and by expert within
    gate_up, down = (_weights(getattr(module, name), ranks) for name in _MATRICES)
    answers = _linear(module._apply_gate(_linear(arrived[by_expert], gate_up, shares)), down, shares)
    home = _exchange(answers[by_expert.argsort()], out_sizes, in_sizes, group)
    each = home[order.argsort()].unflatten(0, (-1, chosen))
    return (each * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def _linear(tokens: torch.Tensor, weights: torch.Tensor, shares: list[int]) -> torch.Tensor:
    """Each expert's matrix on its share of the tokens; one without tokens gets a gradient of zeros."""
    parts = zip(tokens.split(shares), weights.unbind(0), strict=True)
    return torch.cat([functional.linear(part, weight) for part, weight in parts])


def _weights(parameter: torch.Tensor, ranks: int) -> torch.Tensor:
    """This rank's experts, their gradient divided by the group's ranks.

    Tokens of all of them come here, so the gradient is already their sum; that of all other weights is their mean,
    which is what FSDP and DDP make of gradients.
    """
    divided: torch.Tensor = _DividedGradient.apply(meshes.local(parameter), ranks)
    return divided


class _DividedGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, by: int) -> torch.Tensor:
        context.by = by
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient / context.by, None


def _exchange(tokens: torch.Tensor, arriving: list[int], leaving: list[int], group: Group) -> torch.Tensor:
    """All-to-all over the first dimension, with its gradient."""
    moved: torch.Tensor = wait_tensor(all_to_all_single_autograd(tokens.contiguous(), arriving, leaving, group.ranks))
    return moved


ALL_EXPERTS_FUNCTIONS.register(DISPATCHED, dispatched_experts)
