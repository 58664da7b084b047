"""The norm of one gradient that is spread over ranks, and its clipping.

On a mixed mesh parameters live in different places: a matrix in parts on shard and tensor ranks, a norm's weights in
parts on shard ranks and equal on tensor ranks, an adapter's half equal on both. Every number of the gradient must be
in the sum of squares exactly once. Knows torch's placements, and nothing of models and strategies.
"""

from collections.abc import Iterable

import torch
import torch.distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from actors.training import mesh as meshes


def clip(
    parameters: Iterable[torch.nn.Parameter], max_norm: float, *, across: ProcessGroup | None = None
) -> torch.Tensor:
    """Clip the gradients of `parameters` in place by their common L2 norm; the norm before, a scalar on their device.

    Called on every rank. `across` joins ranks that hold different parameters (the stages of a pipeline).
    """
    parameters = list(parameters)
    gradients = [_laid_out(parameter) for parameter in parameters if parameter.grad is not None]
    squares = _sum_of_squares(gradients) if gradients else torch.zeros((), device=parameters[0].device)
    if across is not None:
        torch.distributed.all_reduce(squares, group=across)
    norm = squares.sqrt()
    if gradients:
        torch._foreach_mul_([meshes.local(gradient) for gradient in gradients], factor(norm, max_norm))
    return norm


def factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What a gradient of `norm` is multiplied with, as by torch.nn.utils.clip_grad_norm_."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def _sum_of_squares(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Over the whole gradient, of which every rank has parts: one small all-reduce per way of being spread."""
    spread: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[torch.Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
        spread.setdefault((mesh, _cut_along(gradient)), []).append(meshes.local(gradient))
    squares = []
    for (mesh, axes), parts in spread.items():
        mine = torch.nn.utils.get_total_norm(parts).float().square()
        for axis in axes:  # along the others each rank has the same numbers
            assert mesh is not None
            torch.distributed.all_reduce(mine, group=mesh.get_group(axis))
        squares.append(mine)
    return torch.stack(squares).sum()


def _cut_along(gradient: torch.Tensor) -> tuple[int, ...]:
    """The axes of its mesh along which ranks have different parts of it."""
    if not isinstance(gradient, DTensor):
        return ()
    sizes = gradient.device_mesh.shape
    return tuple(axis for axis, place in enumerate(gradient.placements) if not place.is_replicate() and sizes[axis] > 1)


def _laid_out(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The gradient as its parameter lies: what ranks have yet to add up is added up."""
    assert parameter.grad is not None
    if (
        isinstance(parameter, DTensor)
        and isinstance(parameter.grad, DTensor)
        and parameter.grad.placements != parameter.placements
    ):
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    return parameter.grad
