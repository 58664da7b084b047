"""What is learned: each objective turns a micro-batch into a summed loss, or into the vectors that one is made of."""

from collections.abc import Callable
from typing import Any

import torch

from actors.training.batching import MicroBatch
from actors.training.config import ContrastiveConfig, TrainConfig
from actors.training.objectives.contrastive import ContrastiveObjective, count_pairs, count_triplets
from actors.training.objectives.sft import SftObjective, count_loss_tokens


def build(config: TrainConfig, model: Any) -> torch.nn.Module:
    """The objective of that kind around `model`."""
    objectives = {"sft": SftObjective, "contrastive": ContrastiveObjective}
    return objectives[config.objective.kind](model, config.precision)


def count_terms(config: TrainConfig) -> Callable[[MicroBatch], int]:
    """What counts the terms of the summed loss of a micro-batch: loss tokens, pairs or triplets."""
    if isinstance(config.objective, ContrastiveConfig):
        return count_triplets if config.objective.loss == "triplet" else count_pairs
    return count_loss_tokens
