"""Dense decoders in the shape of Llama (SmolLM2, Qwen, Mistral, …), spread over a mesh.

The order matters: tensor parallelism cuts the matrices first, activation checkpointing wraps what it has cut,
the compiler sees both, and data parallelism comes last, around everything that is computed.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from actors.training.config import TrainConfig
from actors.training.layout import Layout


def parallelize(objective: torch.nn.Module, config: TrainConfig, layout: Layout, mesh: DeviceMesh) -> torch.nn.Module:
    """`objective` (whose `model` is the decoder), spread over `mesh`; what to call instead of it."""
    model: Any = objective.model
    layers = model.get_decoder().layers
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if config.compile:
        for layer in layers:
            layer.compile()
    if config.parallel.strategy == "ddp":
        if layout.replicate == 1:
            return objective
        group = mesh.get_group("replicate")
        return DistributedDataParallel(
            objective, process_group=group, broadcast_buffers=False, gradient_as_bucket_view=True
        )
    shards = mesh["shard"]
    for layer in layers:
        fully_shard(layer, mesh=shards)
    return fully_shard(objective, mesh=shards)
