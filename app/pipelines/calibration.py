"""How fast this machine trains, as earlier runs on it showed, so that a plan can say how long the next will take.

One small file under the home. A rate is operations per second and worker, so that a run of another model, length or
batch can be estimated from it; it is used only where the precision, the kind of adapter and the machine are the same.
"""

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from actors.training.config import TrainConfig
from actors.training.flops import per_token
from actors.training.shape import Shape
from cluster.config import Config
from cluster.storage import Home, write_atomically


class Rate(Config):
    """What a run reached: floating-point operations per second, of each worker."""

    flops_per_s: float
    workers: int
    run: str
    at: str


_FILE = TypeAdapter(dict[str, Rate])


def record(home: Home, config: TrainConfig, shape: Shape, *, length: int, tokens_per_s: float, run: str) -> None:
    """Keep what a completed run reached; the newest of a kind counts. One that made no step reached nothing."""
    if not tokens_per_s:
        return
    workers = config.parallel.workers.max
    rate = Rate(
        flops_per_s=tokens_per_s * per_token(config, shape, length=length) / workers,
        workers=workers,
        run=run,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    rates = {**_read(home), _kind(config): rate}
    write_atomically(_path(home), _FILE.dump_json(rates, indent=2).decode() + "\n")


def known(home: Home, config: TrainConfig) -> Rate | None:
    """The rate of the newest run of this kind on this machine."""
    return _read(home).get(_kind(config))


def seconds(rate: Rate, config: TrainConfig, shape: Shape, *, length: int) -> float:
    """How long all steps take at `rate`, if every row is full and the workers share nothing but the work."""
    tokens = config.steps * config.optimizer.global_batch_size * length
    return tokens * per_token(config, shape, length=length) / (rate.flops_per_s * config.parallel.workers.max)


def _kind(config: TrainConfig) -> str:
    """Runs that can be compared: the machine and what its speed depends on most."""
    machine = f"{platform.machine()}-{os.cpu_count()}"
    model = config.parallel.ranks_per_replica * config.parallel.expert
    spread = f"{config.parallel.strategy}{'' if model == 1 else f'-{model}'}"
    return f"{machine}/{config.precision}/{config.adapter.kind}/{spread}"


def _path(home: Home) -> Path:
    return home.root / "calibration.json"


def _read(home: Home) -> Mapping[str, Rate]:
    try:
        return _FILE.validate_json(_path(home).read_bytes())
    except (OSError, ValidationError):
        return {}  # no run yet, or a file of another release: the next run writes it anew
