"""AdamW and the learning rate of every step. The schedule is a pure function of the step: it has no state to save."""

import math
from collections.abc import Iterable

import torch

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
    return torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value
