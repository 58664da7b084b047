"""AdamW and the learning rate of every step. The schedule is a pure function of the step: it has no state to save."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from actors.training.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of `step` (from 0) in a run of `steps`: linear warm-up, then the schedule down towards 0.

    The first step already learns and the last one still does, so no step is wasted at rate 0.
    """
    warmup = math.ceil(config.warmup_ratio * steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    if config.schedule == "cosine":
        return config.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
    if config.schedule == "linear":
        return config.learning_rate * (1 - done)
    return config.learning_rate


def build(config: OptimizerConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.AdamW:
    """AdamW over `parameters`; the loop sets the learning rate of each step."""
    # One group for each mesh: torch updates a group in one go, which tensors of different meshes cannot be.
    meshes: dict[DeviceMesh | None, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        meshes.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    groups = [{"params": group} for group in meshes.values()]
    return torch.optim.AdamW(groups, lr=config.learning_rate, weight_decay=config.weight_decay)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


MOMENTS = ("exp_avg", "exp_avg_sq")


def begin(optimizer: torch.optim.Optimizer) -> None:
    """Make the moments that AdamW would make at its first step, so that there is a state to save or to fill."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    **{name: torch.zeros_like(parameter) for name in MOMENTS},
                }


def state(optimizer: torch.optim.Optimizer, learning: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Weights and moments as `Engine.state` names them: the live tensors. AdamW has `begun`."""
    found = {f"weights/{name}": parameter.detach() for name, parameter in learning.items()}
    for moment in MOMENTS:
        found |= {f"{moment}/{name}": optimizer.state[parameter][moment] for name, parameter in learning.items()}
    return found


def load(
    optimizer: torch.optim.Optimizer,
    learning: Mapping[str, torch.nn.Parameter],
    filled: Mapping[str, torch.Tensor],
    step: int,
) -> None:
    """Put `filled`, laid out as `state` gives it, into parameters and moments; AdamW has made `step` steps."""
    begin(optimizer)
    for name, tensor in state(optimizer, learning).items():
        if tensor is not filled[name]:  # filled in place, where it lives, is in place already
            tensor.copy_(filled[name])
    for parameter in learning.values():
        optimizer.state[parameter]["step"].fill_(step)
