"""Which rows belong to which step: pure arithmetic, the same for every number of workers.

The feed cuts the rows of an epoch, in their order, into micro-batches and deals them to the workers in turn.
A step takes the next `global_batch_size` rows whatever the world size, so a run that restarts, or resumes with
more or fewer workers, sees every row of an epoch exactly once. This module knows neither torch nor Ray.
"""

from dataclasses import dataclass

from cluster.errors import ConfigError

COLUMNS = ("input_ids", "labels", "position_ids")
"""What a row is: three lists of one length, whole numbers."""


@dataclass(frozen=True)
class StepPlan:
    """How `rows` per epoch become `steps` optimizer steps. Steps, epochs, rows and ranks count from 0."""

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
    def accumulation(self) -> int:
        """Micro-batches of one worker in one step."""
        return self.global_batch_size // (self.micro_batch_size * self.world_size)

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in the rows; the tail that fills none is left out of the epoch."""
        return self.rows // self.global_batch_size

    @property
    def rows_per_epoch(self) -> int:
        return self.steps_per_epoch * self.global_batch_size

    @property
    def micro_batches_per_epoch(self) -> int:
        """Micro-batches that one worker sees in an epoch."""
        return self.steps_per_epoch * self.accumulation

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def micro_batches_before(self, step: int) -> int:
        """Micro-batches of its epoch that one worker has used when `step` begins."""
        return step % self.steps_per_epoch * self.accumulation

    def rows_of(self, step: int, rank: int) -> list[list[int]]:
        """Row numbers of each micro-batch that `rank` works on in `step`."""
        first = self.micro_batches_before(step)
        return [
            list(range(begin, begin + self.micro_batch_size))
            for index in range(first, first + self.accumulation)
            for begin in [(index * self.world_size + rank) * self.micro_batch_size]
        ]
