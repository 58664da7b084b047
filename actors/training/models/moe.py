"""Mixtures of experts (Qwen2-MoE, Qwen3-MoE, OLMoE, Mixtral), spread over a mesh. `parallelize` is the recipe.

The order is that of `dense`, with the experts' places in front: they are cut along the experts, once, and whatever
comes after takes the rest of the model for what it is. The router is trained by the loss of what is learned alone:
its balance, for which transformers has an extra term that is off in the configs of such models
(`output_router_logits`), is what pretraining has left.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from actors.training import adapter, expert
from actors.training.config import TrainConfig
from actors.training.layout import Layout
from actors.training.models import dense
from cluster.errors import ConfigError


def parallelize(
    objective: torch.nn.Module, config: TrainConfig, layout: Layout, device: torch.device, mesh: DeviceMesh | None
) -> torch.nn.Module:
    """`objective` (whose `model` is the mixture), spread over `mesh`; what to call instead of it.

    A mesh of None is one process.
    """
    expert.refuse_tensor(
        objective.model, layout, hint="Spread whole experts with parallel.expert, or use strategy fsdp."
    )
    if layout.expert > 1:
        spread_experts(objective, config, layout, device)
    return dense.parallelize(objective, config, layout, device, mesh)


def spread_experts(objective: torch.nn.Module, config: TrainConfig, layout: Layout, device: torch.device) -> None:
    """Give each rank its experts, and those that hold the same ones a shard each of these.

    The exchange of the experts' gradients is thereby settled: what comes around the whole model leaves them alone,
    FSDP because inner units are no part of outer ones, DDP because it is told so.
    """
    model: Any = objective.model
    if any(".experts." in name and ".lora_" in name for name in adapter.learning(model)):
        # PEFT (0.21) adds them to the matrices in every forward, with torch's parametrizations.
        raise ConfigError(
            "An adapter on fused experts is a change of whole matrices, which ranks that hold some experts cannot add.",
            hint="Choose adapter.target_modules among the attention's: q_proj, k_proj, v_proj, o_proj; all-linear "
            "means the experts too. Or use parallel.expert 1.",
        )
    mesh = expert.mesh_of(layout, device)
    copies = mesh["copies"]
    held = expert.spread(model, mesh["expert"])
    for experts in held:
        widths = [matrix.shape[1] for matrix in experts.parameters()]
        if any(width % copies.size() for width in widths):
            raise ConfigError(
                f"Experts that are {widths} wide cannot be cut for the {copies.size()} ranks that hold them.",
                hint="Raise parallel.expert or use fewer workers.",
            )
        # Along the width: a rank may have fewer experts than there are copies of it.
        fully_shard(
            experts,
            mesh=copies,
            shard_placement_fn=lambda _: Shard(1),
            mp_policy=dense.mixed_precision(config),
        )
    mine = {id(matrix) for experts in held for matrix in experts.parameters()}
    names = [name for name, part in objective.named_parameters() if id(part) in mine]
    # torch's way to tell DDP, used by FSDP's authors; still private in 2.13.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(objective, names)
