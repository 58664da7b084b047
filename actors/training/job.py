"""What the driver tells its workers and hears back: plain picklable values, readable without torch or Ray."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.training.config import TrainConfig
from actors.training.control import Incident
from cluster.models import StoredModel
from cluster.progress import Sink
from cluster.storage import Home

OnCheckpoint = Callable[[str, int, str, Mapping[str, float]], None]
"""Called on rank 0 with (checkpoint id, step, folder, metrics) once the checkpoint is durable.

May be called again for the same checkpoint after a restart, so it must be idempotent. Must be picklable."""


Protected = Callable[[], Mapping[int, str]]
"""Steps of the run whose checkpoints must stay, each with the reason; `FlywheelError` while nobody can say.

Must be picklable."""


OnIncident = Callable[[Incident], None]
"""Called by the run's controller when something has happened to its workers. Must be picklable."""


@dataclass(frozen=True)
class Job:
    """All that a worker is told. `rows` are those of the training split, before any cut to whole batches."""

    config: TrainConfig
    run_id: str
    base: StoredModel
    home: Home
    """Whose keys are trusted."""
    rows: int
    run_folder: Path
    # Ray Train keeps the repr of what its workers are given and shows it; a URI may hold a password.
    tracking_uri: str = field(repr=False)
    tracking_run_id: str | None
    """The tracker's id of the run; None if nobody shows it."""
    sink: Sink
    on_checkpoint: OnCheckpoint
    protected: Protected | None = None
    control: Any = field(default=None, repr=False)
    """Handle of the run's `RunControl`; None if nobody controls it."""


@dataclass(frozen=True)
class Position:
    """Where a run stands: `step` optimizer steps are done, `rows` rows of the feed are used.

    Losses are means over one step's loss tokens, in nats; NaN before the first step.
    """

    run_id: str
    step: int
    rows: int
    loss_first: float
    loss_last: float
    loss_tokens: int


@dataclass(frozen=True)
class Outcome:
    """What a run that reached its last step leaves. `tokens_per_s` is over all workers, without the start."""

    position: Position
    checkpoint_id: str
    adapter: Path
    tokens_per_s: float


@dataclass(frozen=True)
class Stopped:
    """What a run leaves that was asked to end before its last step. It can be taken up again."""

    position: Position


def checkpoint_id(run_id: str, step: int) -> str:
    return f"{run_id}/step-{step}"
