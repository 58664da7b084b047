"""From packed rows to the tensors of a micro-batch, in the order that `steps.StepPlan` names.

Owns the shapes of the feed, and checks that each rank gets the rows that the plan gives it. It knows Arrow tables
and an iterator of them, not where they come from.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch

from actors.training.order import Rows
from actors.training.steps import COLUMNS, POSITION, ROW, SAMPLES, StepPlan
from cluster.errors import TrainingError

NO_LOSS = -100
"""Label of a token that nothing is learned from: prompts and padding."""


@dataclass(frozen=True)
class Origin:
    """Where the rows of a micro-batch come from: the position of each in the run, its number in the training split,
    and the ids of all samples that are packed into them."""

    positions: Rows
    rows: Rows
    samples: tuple[str, ...]


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass; every tensor is [B, T] int64.

    `position_ids` start again at 0 with each packed example: they are what keeps the examples apart. `origin` is
    known to the rank that read the rows, not to those that it shares them with.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    origin: Origin | None = None

    @classmethod
    def from_arrow(cls, table: Any) -> "MicroBatch":
        """`table` has the three columns as lists of one length; anything else is a `TrainingError`."""
        matrices = {name: _matrix(table, name) for name in COLUMNS}
        if len({matrix.shape for matrix in matrices.values()}) > 1:
            raise _misshapen(f"Columns {', '.join(COLUMNS)} hold rows of different lengths")
        return cls(**matrices)

    def to(self, device: torch.device) -> "MicroBatch":
        return replace(self, **{name: getattr(self, name).to(device) for name in COLUMNS})

    @property
    def tokens(self) -> int:
        """Tokens of content: all up to the last one with a loss, since an example ends in its completion."""
        learned = self.labels != NO_LOSS
        return int(learned.flip(1).cumsum(1).gt(0).sum())


def micro_batches(shares: Iterable[Any], plan: StepPlan, *, rank: int, start: int) -> Iterator[MicroBatch]:
    """The micro-batches of `rank` from step `start` to the last one of the run.

    `shares` gives one table for each step: this rank's whole share of it, in order, from `start` or from an earlier
    step on. What belongs to earlier steps is dropped; any other table than the one that is due is a `TrainingError`,
    which a new feed may mend.
    """
    stream = iter(shares)
    for step in range(start, plan.steps):
        due = np.arange(plan.first(step, rank), plan.first(step, rank) + plan.share)
        for table in stream:
            positions = table.column(POSITION).to_numpy()
            if len(positions) and positions[-1] < plan.first(start):
                continue
            if not np.array_equal(positions, due):
                raise TrainingError(
                    f"The data feed gave rank {rank} of {plan.world_size} {_named(positions)} "
                    f"where step {step + 1} takes {_named(due)}.",
                    hint="Start the run again; if this comes back, report it with the log.",
                    retryable=True,
                )
            break
        else:
            raise TrainingError(
                f"The data feed of rank {rank} ended before step {step + 1}, which takes {_named(due)}.",
                hint="Start the run again; if this comes back, report it with the log.",
                retryable=True,
            )
        for begin in range(0, plan.share, plan.micro_batch_size):
            part = table.slice(begin, plan.micro_batch_size)
            origin = Origin(
                positions=positions[begin : begin + plan.micro_batch_size],
                rows=part.column(ROW).to_numpy(),
                samples=tuple(sample for row in part.column(SAMPLES).to_pylist() for sample in row),
            )
            yield replace(MicroBatch.from_arrow(part), origin=origin)


def _named(positions: Rows) -> str:
    if not len(positions):
        return "no rows"
    gaps = "" if len(positions) == positions[-1] - positions[0] + 1 else ", not all of them,"
    return f"positions {positions[0]} to {positions[-1]}{gaps}"


def _matrix(table: Any, name: str) -> torch.Tensor:
    column = table.column(name)
    if len(pc.unique(pc.list_value_length(column))) != 1 or column.null_count:
        raise _misshapen(f"Column {name!r} holds rows of different lengths")
    flat = np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks])
    if flat.dtype.kind not in "iu":  # a token that is missing makes floats of all
        raise _misshapen(f"Column {name!r} holds {flat.dtype} where whole numbers belong, or gaps")
    return torch.from_numpy(flat.astype(np.int64).reshape(len(column), -1))


def _misshapen(what: str) -> TrainingError:
    return TrainingError(f"{what}.", hint="Build the token version again.")
