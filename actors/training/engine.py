"""The seam between the training loop and parallelism: one optimizer step, whatever the mesh under it.

The loop knows rows, steps, metrics and checkpoints. An engine knows how one model is spread over ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from actors.training.batching import MicroBatch
from actors.training.config import TrainConfig
from actors.training.layout import Layout


@dataclass(frozen=True)
class Place:
    """Which worker this is."""

    rank: int
    world_size: int
    device: torch.device


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step says of itself.

    `loss_sum`: the loss (of sft, cross-entropy in nats), summed so that the sum over all ranks is the sum over the
    global batch.
    `grad_norm`: L2 norm of the whole gradient before clipping, the same on every rank.
    """

    loss_sum: float
    grad_norm: float


class Engine(Protocol):
    """One model in training on a mesh. Every method is called on every rank, in the same order."""

    @property
    def model(self) -> Any:
        """The Hugging Face or PEFT model it was made from, for its configs: its weights may be spread."""
        ...

    def step(self, micro: Sequence[MicroBatch], *, loss_tokens: float, learning_rate: float) -> StepResult:
        """One optimizer step on this data rank's micro-batches.

        The gradient is that of the loss (of sft, the cross-entropy) summed over the global batch, divided by
        `loss_tokens`, the number of terms in that sum. It is clipped by its norm over all parameters.
        """
        ...

    def state(self) -> dict[str, torch.Tensor]:
        """All that a checkpoint holds of model and optimizer: `weights/N`, `exp_avg/N` and `exp_avg_sq/N`.

        N are the names of the parameters that learn, as PEFT or Hugging Face save them. Values are tensors or
        DTensors; a rank that lacks a parameter (another pipeline stage's) leaves it out. Moments are zeros before
        the first step. The tensors may be the live ones: whoever keeps them copies them.
        """
        ...

    def load(self, state: Mapping[str, torch.Tensor], step: int) -> None:
        """Go on from `state`, a dict that `state()` gave and somebody has filled in place, after `step` steps."""
        ...

    def close(self) -> None:
        """Free what outlives the object."""
        ...


def build(config: TrainConfig, base: Path, base_name: str, place: Place, layout: Layout) -> Engine:
    """The engine that the config asks for, around the base model in the folder `base`.

    The torch process group must be up if there is more than one rank.
    """
    if config.parallel.strategy.startswith("zero"):
        from actors.training.strategies.zero import ZeroEngine  # deepspeed, which only these runs need

        return ZeroEngine(config, base, base_name, place, layout)
    if layout.pipeline > 1:
        from actors.training.strategies.pipeline import PipelineEngine

        return PipelineEngine(config, base, base_name, place, layout)
    if config.objective.kind == "contrastive":
        from actors.training.strategies.contrastive import ContrastiveEngine

        return ContrastiveEngine(config, base, base_name, place, layout)
    from actors.training.strategies.native import NativeEngine

    return NativeEngine(config, base, base_name, place, layout)
