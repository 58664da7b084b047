"""Which rows belong to which step: pure arithmetic, the same for every number of workers.

A run takes the rows of its feed one after another: a step takes the next `global_batch_size` positions, and each
share of a step is a part of them without gaps. What a step takes does not depend on how many shares there are, so a
run that restarts, or goes on with more or fewer workers, takes every position exactly once. Which row stands at a
position is `order`'s to say. This module knows neither torch nor Ray.
"""

from dataclasses import dataclass

from cluster.errors import ConfigError

COLUMNS = ("input_ids", "labels", "position_ids")
"""What a row is to a model: three lists of one length, whole numbers."""

POSITION, ROW, SAMPLES = "position", "row", "sample_ids"
"""What a row is to the accounts: its position in the run, its number in its split, the ids packed into it."""


@dataclass(frozen=True)
class StepPlan:
    """How `rows` per epoch become `steps` optimizer steps. Steps, epochs, positions and ranks count from 0.

    `world_size` counts the ranks that work on different rows (`Layout.data`), and `rank` is one of them: ranks that
    share a replica of the model share its rows.
    """

    rows: int
    steps: int
    global_batch_size: int
    micro_batch_size: int
    world_size: int

    def __post_init__(self) -> None:
        if self.rows < self.global_batch_size:
            raise ConfigError(
                f"The training split has {self.rows} rows, fewer than one global batch of {self.global_batch_size}.",
                hint="Lower optimizer.global_batch_size, shorten data.max_length, or give more data.",
            )
        if self.global_batch_size % (self.micro_batch_size * self.world_size):
            raise ConfigError(
                f"A global batch of {self.global_batch_size} cannot be shared by {self.world_size} workers "
                f"in micro-batches of {self.micro_batch_size}.",
                hint="Make optimizer.global_batch_size a multiple of workers × optimizer.micro_batch_size.",
            )

    @property
    def share(self) -> int:
        """Rows of one rank in one step."""
        return self.global_batch_size // self.world_size

    @property
    def accumulation(self) -> int:
        """Micro-batches of one rank in one step."""
        return self.share // self.micro_batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in the rows; the tail that fills none is left out of the epoch."""
        return self.rows // self.global_batch_size

    @property
    def rows_per_epoch(self) -> int:
        return self.steps_per_epoch * self.global_batch_size

    @property
    def positions(self) -> int:
        """Rows that the whole run takes, over all its epochs."""
        return self.steps * self.global_batch_size

    def first(self, step: int, rank: int = 0) -> int:
        """The position at which the share of `rank` in `step` begins; it ends `share` positions later."""
        return step * self.global_batch_size + rank * self.share
