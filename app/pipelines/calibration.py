"""How fast this machine trains, as earlier runs on it showed, so that a plan can say how long the next will take.

One small file under the home. A rate is operations per second and worker, so that a run of another model, length or
batch can be estimated from it. It is used only where the machine, the device, the number of workers, the precision and
what learns are the same: on a machine that they share, twice the workers are not twice as fast.
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


def record(
    home: Home, config: TrainConfig, shape: Shape, *, length: int, tokens_per_s: float, run: str, on_gpu: bool = False
) -> None:
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
    rates = {**_read(home), _kind(config, on_gpu): rate}
    write_atomically(_path(home), _FILE.dump_json(rates, indent=2).decode() + "\n")


def known(home: Home, config: TrainConfig, *, on_gpu: bool = False) -> Rate | None:
    """The rate of the newest run of this kind on this machine."""
    return _read(home).get(_kind(config, on_gpu))


def seconds(rate: Rate, config: TrainConfig, shape: Shape, *, length: int) -> float:
    """How long all steps take at `rate`, if every row is full and the workers share nothing but the work."""
    tokens = config.steps * config.optimizer.global_batch_size * length
    return tokens * per_token(config, shape, length=length) / (rate.flops_per_s * config.parallel.workers.max)


def _kind(config: TrainConfig, on_gpu: bool) -> str:
    """Runs that can be compared: the machine and what its speed depends on most."""
    machine = f"{platform.machine()}-{os.cpu_count()}{'-gpu' if on_gpu else ''}"
    axes = config.parallel
    sizes = {axis: getattr(axes, axis) for axis in ("pipeline", "context", "tensor", "expert")}
    wide = [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
    spread = "-".join([axes.strategy, f"{axes.workers.min}..{axes.workers.max}", *wide])
    compiled = "/compiled" if config.compile else ""
    return f"{machine}/{config.precision}/{config.adapter.kind}/{spread}{compiled}"


def _path(home: Home) -> Path:
    return home.root / "calibration.json"


def _read(home: Home) -> Mapping[str, Rate]:
    try:
        return _FILE.validate_json(_path(home).read_bytes())
    except (OSError, ValidationError):
        return {}  # no run yet, or a file of another release: the next run writes it anew
