"""From packed rows to the tensors of a micro-batch, in the order that `steps.StepPlan` names.

Owns the shapes of the feed. It knows Arrow tables and an iterator of them, not where they come from.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from actors.training.steps import COLUMNS, StepPlan
from cluster.errors import TrainingError

NO_LOSS = -100
"""Label of a token that nothing is learned from: prompts and padding."""


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass; every tensor is [B, T] int64.

    `position_ids` start again at 0 with each packed example: they are what keeps the examples apart.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor

    @classmethod
    def from_arrow(cls, table: Any) -> "MicroBatch":
        """`table` has the three columns as lists of one length; anything else is a `TrainingError`."""
        return cls(**{name: _matrix(table, name) for name in COLUMNS})

    def to(self, device: torch.device) -> "MicroBatch":
        return MicroBatch(**{name: getattr(self, name).to(device) for name in COLUMNS})

    @property
    def tokens(self) -> int:
        """Tokens of content: all up to the last one with a loss, since an example ends in its completion."""
        learned = self.labels != NO_LOSS
        return int(learned.flip(1).cumsum(1).gt(0).sum())


def micro_batches(epoch: Callable[[], Iterable[Any]], plan: StepPlan, start: int) -> Iterator[MicroBatch]:
    """This worker's micro-batches from step `start` on, without end; `epoch()` begins one more pass.

    Every pass must give the same tables in the same order: what `start` has behind it is read and dropped.
    """
    used = plan.micro_batches_before(start)
    while True:
        given = 0
        for table in epoch():
            given += 1
            if given > used:
                yield MicroBatch.from_arrow(table)
        if given != plan.micro_batches_per_epoch:
            raise TrainingError(
                f"The data feed gave {given} micro-batches in an epoch that has {plan.micro_batches_per_epoch}.",
                hint="The data version's files do not match its manifest; build it again.",
            )
        used = 0


def _matrix(table: Any, name: str) -> torch.Tensor:
    column = table.column(name)
    flat = np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks])
    if not len(column) or flat.size % len(column):
        raise TrainingError(f"Column {name!r} holds rows of different lengths.", hint="Build the token version again.")
    return torch.from_numpy(flat.astype(np.int64).reshape(len(column), -1))
