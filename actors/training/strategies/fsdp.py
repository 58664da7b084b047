"""Fully sharded data parallel (FSDP2; Zhao et al. 2023, arXiv:2304.11277): every worker holds a part of each weight.

Right when the frozen base does not fit in one worker. Weights are gathered layer by layer, just before use.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


class Fsdp:
    """Shards each decoder layer by itself, then what is left (embeddings, head, last norm) as one group."""

    def __init__(self, device: torch.device, world_size: int) -> None:
        self._device = device
        self._world_size = world_size

    def wrap(self, objective: torch.nn.Module) -> torch.nn.Module:
        objective.to(self._device)
        if self._world_size == 1:
            return objective
        mesh = init_device_mesh(self._device.type, (self._world_size,), mesh_dim_names=("data",))
        model: Any = objective.model
        for layer in model.get_decoder().layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(objective, mesh=mesh)

    @contextmanager
    def accumulating(self, module: torch.nn.Module, *, last: bool) -> Iterator[None]:
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last)
        yield

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def part(self, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(self._device)
        if isinstance(parameter, DTensor):
            return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
        return tensor
