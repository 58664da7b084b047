"""What is learned: each objective turns a micro-batch into a summed loss."""

from typing import Any

import torch

from actors.training.config import TrainConfig
from actors.training.objectives.sft import SftObjective


def build(config: TrainConfig, model: Any) -> torch.nn.Module:
    """The objective of that kind around `model`."""
    objectives = {"sft": SftObjective}
    return objectives[config.objective.kind](model, config.precision)
