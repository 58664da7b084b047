"""What the training tests share: packed rows, a feed of them without Ray, a reporter that remembers."""

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from actors.training.batching import NO_LOSS, MicroBatch, micro_batches
from actors.training.config import TrainConfig
from actors.training.engine import Place
from actors.training.job import Job, Position
from actors.training.order import Order
from actors.training.steps import POSITION, StepPlan
from cluster.models import obtain
from cluster.progress import silent
from cluster.storage import Home

VOCABULARY = 128
PADDING = 0


def examples(count: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """(input_ids, labels) of short examples; the loss is on the last third."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        ids = [draw.randrange(1, VOCABULARY) for _ in range(draw.randrange(3, 10))]
        prompt = len(ids) - max(1, len(ids) // 3)
        made.append((ids, [NO_LOSS] * prompt + ids[prompt:]))
    return made


def packed_rows(count: int, *, length: int, seed: int) -> pa.Table:
    """`count` rows of `length` tokens, each filled with examples as they come and padded."""
    rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "position_ids": []}
    stream = iter(examples(count * length, seed))
    for _ in range(count):
        ids: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        for example_ids, example_labels in stream:
            if len(ids) + len(example_ids) > length:
                break
            ids, labels = ids + example_ids, labels + example_labels
            positions += range(len(example_ids))
        gap = length - len(ids)
        rows["input_ids"].append(ids + [PADDING] * gap)
        rows["labels"].append(labels + [NO_LOSS] * gap)
        rows["position_ids"].append(positions + list(range(gap)))
    columns = {name: pa.array(values, pa.list_(pa.int32())) for name, values in rows.items()}
    sample_ids = [[f"sample-{row}-{number}" for number in range(1 + row % 3)] for row in range(count)]
    return pa.table(columns | {"sample_ids": sample_ids, "row": pa.array(range(count), pa.int64())})


def memory_feed(table: pa.Table, rank: int = 0, *, seed: int = 0) -> Callable[[StepPlan, int], Iterator[MicroBatch]]:
    """The feed that Ray Data must equal: the rows that plan and order name, taken from a table."""

    def feed(plan: StepPlan, step: int) -> Iterator[MicroBatch]:
        return micro_batches(shares(table, plan, rank, step, seed=seed), plan, rank=rank, start=step)

    return feed


def shares(table: pa.Table, plan: StepPlan, rank: int, start: int, *, seed: int = 0) -> Iterator[pa.Table]:
    """What a rank is dealt: its rows of each step, with their positions."""
    order = Order.of(plan, seed=seed, shuffle=True)
    for step in range(start, plan.steps):
        begin = plan.first(step, rank)
        positions = pa.array(range(begin, begin + plan.share), pa.int64())
        yield table.take(order.rows_at(begin, begin + plan.share)).append_column(POSITION, positions)


class Remembered:
    """A reporter that keeps what it is told; with `stop_after`, the run is cut off after the step behind that one,
    as soon as that one is durable."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.checkpoints: list[Path] = []
        self.resumed_at: int | None = None
        self._stop_after = stop_after
        self._durable = threading.Event()

    def resumed(self, position: Position) -> None:
        self.resumed_at = position.step

    def step(self, position: Position, metrics: Mapping[str, float]) -> None:
        self.losses.append(metrics["loss"])
        self.norms.append(metrics["grad_norm"])
        if self._stop_after is not None and position.step > self._stop_after:
            assert self._durable.wait(60)
            raise KeyboardInterrupt

    def checkpoint(self, position: Position, uri: str, metrics: Mapping[str, float]) -> None:
        self.checkpoints.append(Path(uri))
        if position.step == self._stop_after:
            self._durable.set()


HERE = Place(rank=0, world_size=1, device=torch.device("cpu"))


def settings(**changes: Any) -> TrainConfig:
    """A short fp32 run: 8 steps of 4 rows, a checkpoint every 2 steps; `changes` are whole sections."""
    plain: dict[str, Any] = {
        "adapter": {"r": 4, "alpha": 8},
        "optimizer": {"learning_rate": 2e-2, "global_batch_size": 4, "micro_batch_size": 1},
        "checkpoint": {"every_steps": 2},
        "precision": "fp32",
        "steps": 8,
    }
    return TrainConfig.model_validate({**plain, **changes})


def job(config: TrainConfig, base: Path, run_folder: Path, rows: int, run_id: str = "tiny-1") -> Job:
    """A run on the model folder `base`, signed in a home beside it."""
    home = Home(base.with_name(f"{base.name}-home"))
    return Job(
        config=config,
        run_id=run_id,
        base=obtain(str(base), home),
        home=home,
        rows=rows,
        run_folder=run_folder,
        tracking_uri="",
        tracking_run_id="",
        sink=silent,
        on_checkpoint=lambda identity, step, path, metrics: None,
    )
