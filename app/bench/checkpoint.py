"""`flywheel bench checkpoint`: how long training stands still for a checkpoint.

The real engine and the real `Checkpoints`, all weights in training: weights and both moments in fp32, 1.6 GB at
SmolLM2-135M's shape. In each round, on the same processes and the same state: a plain copy of the same bytes into
memory in use (the limit), a save that training waits for, and an asynchronous one with training going on behind it.
Every figure is the slowest rank's.
"""

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import torch
import torch.distributed

from actors.training import engine as engines
from actors.training import mesh
from actors.training.batching import MicroBatch
from actors.training.checkpoint.saver import Checkpoints
from actors.training.checkpoint.storage import storage_at
from actors.training.config import TrainConfig
from actors.training.engine import Engine, Place
from actors.training.job import Position
from actors.training.layout import Layout
from app.bench import memory
from app.bench.gang import Gang
from app.bench.report import Bar, Report, Result, report
from cluster.progress import Progress, Sink

AT_MOST: Final = 1.5
"""Stall of an asynchronous save over a plain copy."""
_RUN: Final = "bench"


@dataclass(frozen=True)
class Size:
    """`steps` steps of one row of `length` tokens a rank are measured alone, and as many behind a save."""

    length: int = 128
    steps: int = 6
    runs: int = 5


@dataclass(frozen=True)
class Round:
    """Seconds. `alone` and `behind` are those of each step; `behind` those that began while the save went on."""

    copy: float
    sync: float
    stall: float
    commit: float
    alone: tuple[float, ...]
    behind: tuple[float, ...]
    copied_bytes: int


def run(size: Size, sink: Sink, *, base: Path | None = None, ranks: Sequence[int] = (1, 2)) -> Report:
    """Measure with so many ranks, under FSDP; about 6 GiB of memory and 5 GiB of disk in the temporary folder.

    `base` is a model folder to take instead of the 135M shape with random weights.
    """
    results, bars = [], []
    with tempfile.TemporaryDirectory(prefix="flywheel-bench-") as scratch:
        base = base or memory.model(Path(scratch) / "base")
        for number, count in enumerate(ranks):
            sink(Progress("bench", number, len(ranks), "cases", note=f"{count} ranks"))
            gang = Gang()
            try:
                rounds = gang.run(count, work, base, Path(scratch) / f"run-{count}", size, timeout_s=1800)
            finally:
                gang.close()
            measured, bar = compare(f"{count} rank{'s' if count > 1 else ''}", rounds)
            results += measured
            bars.append(bar)
    return report("checkpoint", size.runs, results, bars)


def compare(case: str, by_rank: Sequence[Sequence[Round]]) -> tuple[list[Result], Bar]:
    """The figures of the rounds of each rank."""
    rounds = list(zip(*by_rank, strict=True))

    def slowest(name: str) -> list[float]:
        return [max(getattr(each, name) for each in ranks) for ranks in rounds]

    copy, sync, stall = slowest("copy"), slowest("sync"), slowest("stall")
    alone = [max(median(each.alone) for each in ranks) for ranks in rounds]
    behind = [max(median(each.behind) for each in ranks) for ranks in rounds]
    gibibytes = sum(each.copied_bytes for each in rounds[0]) / 2**30
    ratio = Result.of(f"{case}: stall over copy", "ratio", _over(stall, copy))
    return [
        Result.of(f"{case}: state", "GiB", [gibibytes]),
        Result.of(f"{case}: copy", "s", copy),
        Result.of(f"{case}: stall", "s", stall),
        ratio,
        Result.of(f"{case}: synchronous save", "s", sync),
        Result.of(f"{case}: synchronous over stall", "ratio", _over(sync, stall)),
        Result.of(f"{case}: commit behind", "s", slowest("commit")),
        Result.of(f"{case}: step behind over step alone", "ratio", _over(behind, alone)),
    ], Bar.at_most(ratio, AT_MOST)


def work(place: Place, base: Path, folder: Path, size: Size) -> list[Round]:
    """What one rank does."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.world_size))
    workers = {"min": place.world_size, "max": place.world_size}
    config = TrainConfig.model_validate(
        {
            "adapter": {"kind": "none"},
            "precision": "fp32",
            "parallel": {"strategy": "fsdp", "workers": workers},
            "optimizer": {"global_batch_size": place.world_size, "micro_batch_size": 1},
            "checkpoint": {"keep": 1},
        }
    )
    layout = Layout.of(config.parallel, place.world_size)
    engine = engines.build(config, base, "shape", place, layout)
    checkpoints = Checkpoints(
        storage_at(folder, _RUN), run_id=_RUN, policy=config.checkpoint, rank=place.rank, world_size=place.world_size
    )
    step = _Steps(engine, layout, size, place)
    state = engine.state()
    checkpoints.resume(state)
    copies = {name: torch.zeros_like(mesh.local(tensor)) for name, tensor in state.items()}
    del state
    for _ in range(2):
        step.timed()
    # The first save of a run plans its shards; every one after it is like the others.
    checkpoints.save(engine.state(), step.position())
    checkpoints.finish(insist=True)

    rounds = []
    for _ in range(size.runs):
        alone = [step.timed() for _ in range(size.steps)]
        copied = _timed_copy(place, engine.state(), copies)

        _together(place)
        began = time.perf_counter()
        checkpoints.save(engine.state(), step.position())
        checkpoints.finish(insist=True)
        sync = time.perf_counter() - began

        step.timed()  # a checkpoint is of a step of its own
        checkpoints.take_metrics()
        _together(place)
        began = time.perf_counter()
        checkpoints.save(engine.state(), step.position())
        stalled = time.perf_counter()
        facts = checkpoints.take_metrics()
        each = []
        for _ in range(size.steps):
            at = time.perf_counter() - stalled
            each.append((at, step.timed()))
        settled = checkpoints.finish(insist=True)
        assert settled is not None
        behind = tuple(took for at, took in each if at < settled.seconds)
        bytes_copied = int(facts["checkpoint_copied_bytes"])
        rounds.append(Round(copied, sync, stalled - began, settled.seconds, tuple(alone), behind, bytes_copied))
    engine.close()
    return rounds


class _Steps:
    """Optimizer steps on random rows."""

    def __init__(self, engine: Engine, layout: Layout, size: Size, place: Place) -> None:
        self._engine = engine
        self._tokens = (size.length - 1.0) * layout.data
        self._done = 0
        draw = torch.Generator().manual_seed(place.rank)
        words = engine.model.config.vocab_size
        ids = torch.randint(words, (1, size.length), generator=draw)
        positions = torch.arange(size.length)[None]
        self._batch = MicroBatch(input_ids=ids, labels=ids, position_ids=positions).to(place.device)

    def timed(self) -> float:
        began = time.perf_counter()
        self._engine.step([self._batch], loss_tokens=self._tokens, learning_rate=1e-5)
        self._done += 1
        return time.perf_counter() - began

    def position(self) -> Position:
        return Position(_RUN, step=self._done, rows=0, loss_first=0.0, loss_last=0.0, loss_tokens=0)


def _timed_copy(place: Place, state: Mapping[str, torch.Tensor], copies: Mapping[str, torch.Tensor]) -> float:
    _together(place)
    began = time.perf_counter()
    for name, tensor in state.items():
        copies[name].copy_(mesh.local(tensor))
    return time.perf_counter() - began


def _together(place: Place) -> None:
    if place.world_size > 1:
        torch.distributed.barrier()


def _over(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [value / other for value, other in zip(values, others, strict=True)]
