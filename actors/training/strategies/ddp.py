"""Distributed data parallel: every worker holds the whole model (Li et al. 2020, arXiv:2006.15704).

Right when the model fits in each worker: only the adapter's gradients travel, once per step.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.parallel import DistributedDataParallel


class Ddp:
    """A single worker needs no wrapper."""

    def __init__(self, device: torch.device, world_size: int) -> None:
        self._device = device
        self._world_size = world_size

    def wrap(self, objective: torch.nn.Module) -> torch.nn.Module:
        objective.to(self._device)
        if self._world_size == 1:
            return objective
        on_gpu = [self._device] if self._device.type == "cuda" else None
        return DistributedDataParallel(
            objective, device_ids=on_gpu, broadcast_buffers=False, gradient_as_bucket_view=True
        )

    @contextmanager
    def accumulating(self, module: torch.nn.Module, *, last: bool) -> Iterator[None]:
        if last or not isinstance(module, DistributedDataParallel):
            yield
        else:
            with module.no_sync():
                yield

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def part(self, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return tensor.to(parameter.device)
