"""How one model is trained by several workers. Every strategy averages gradients over the workers."""

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from actors.training.strategies.ddp import Ddp
from actors.training.strategies.fsdp import Fsdp


class Strategy(Protocol):
    """What the loop asks for. All methods are called on every rank, in the same order."""

    def wrap(self, objective: torch.nn.Module) -> torch.nn.Module:
        """`objective`, such that its backward leaves every rank with the mean of all ranks' gradients."""
        ...

    def accumulating(self, module: torch.nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch; gradients are exchanged with the last one only."""
        ...

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """The unsharded value of a parameter, a gradient norm or an optimizer state."""
        ...

    def part(self, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole `tensor`, laid out like `parameter`."""
        ...


def build(kind: str, *, device: torch.device, world_size: int) -> Strategy:
    """The strategy of that name; the torch process group must be up if `world_size` is more than 1."""
    strategies: dict[str, type[Ddp] | type[Fsdp]] = {"ddp": Ddp, "fsdp": Fsdp}
    return strategies[kind](device, world_size)
