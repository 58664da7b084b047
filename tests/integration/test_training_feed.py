"""The feed on real Ray Train and Ray Data: a group that restarts, or has another size, gets exactly what is left.

The workers train nothing. They note the rows they get, commit now and then, and die once.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from actors.training import batching, feed, sharing
from actors.training.batching import MicroBatch
from actors.training.config import ParallelConfig
from actors.training.layout import Layout
from actors.training.ledger import Ledger, Notes, audit
from actors.training.order import Order
from actors.training.steps import StepPlan
from cluster.session import Session
from tests.actors.training.small import packed_rows

pytestmark = pytest.mark.integration

ROWS, STEPS, BATCH, EVERY = 29, 14, 4, 2  # an epoch is 7 steps
SPLIT = (7, 22)  # rows of the files, of which none ends where a batch ends


@dataclass(frozen=True)
class Begun:
    """Where a run stands: what its last commit says. Notes each question, as Ray Train asks once for each group."""

    folder: Path

    def __call__(self) -> int:
        step, _ = committed(self.folder)
        with (self.folder / "asked").open("a") as file:
            file.write(f"{step}\n")
        return step


def committed(folder: Path) -> tuple[int, Ledger]:
    path = folder / "committed.json"
    if not path.exists():
        return 0, Ledger(order())
    facts = json.loads(path.read_text())
    return facts["step"], Ledger.from_json(facts["ledger"])


def plan(shares: int) -> StepPlan:
    return StepPlan(rows=ROWS, steps=STEPS, global_batch_size=BATCH, micro_batch_size=1, world_size=shares)


def order() -> Order:
    whole = Order.of(plan(1), seed=5, shuffle=True)
    return Order(whole.rows, whole.epoch_rows, whole.seed, chunk_rows=4, window_chunks=2)


def work(settings: Mapping[str, Any]) -> None:
    """A worker: what `loop.run` and `loop.train` do with rows, without a model."""
    folder, parallel = settings["folder"], settings["parallel"]
    context = ray.train.get_context()
    rank = context.get_world_rank()
    layout = Layout.of(parallel, context.get_world_size())
    reads = layout.reader(rank) == rank
    dealt = feed.opened() if reads else None
    step, ledger = committed(folder)
    spread, notes = plan(layout.data), Notes(order())
    batches: Iterator[MicroBatch] | None = None
    if dealt is not None:
        batches = batching.micro_batches(dealt, spread, rank=layout.data_rank(rank), start=step)
    if layout.data < layout.world_size:
        batches = sharing.shared(batches, reader=layout.reader(rank), group=sharing.group(layout))
    assert batches is not None
    for number in range(step, settings["until"]):
        for _ in range(spread.accumulation):
            batch = next(batches)
            with (folder / f"got-{os.getpid()}-{rank}").open("a") as file:
                file.write(json.dumps([number, layout.data, batch.input_ids[0].tolist()]) + "\n")
            if batch.origin is not None:
                notes.add(batch.origin.positions, batch.origin.rows, batch.origin.samples)
        if number == settings["die_in"] and rank == 0 and not (folder / "died").exists():
            (folder / "died").touch()
            os._exit(1)
        if (number + 1) % EVERY == 0:
            segments = sharing.gathered(notes.take(), rank=rank, world_size=layout.world_size)
            if rank == 0:
                ledger = ledger.merge_all(segments)
                facts = json.dumps({"step": number + 1, "ledger": ledger.to_json()})
                (folder / "committed.tmp").write_text(facts)
                (folder / "committed.tmp").rename(folder / "committed.json")


def run(folder: Path, files: tuple[Path, ...], parallel: ParallelConfig, *, until: int, die_in: int = -1) -> None:
    stream = feed.Stream(files, SPLIT, order(), STEPS, BATCH, Begun(folder))
    TorchTrainer(
        work,
        train_loop_config={"folder": folder, "parallel": parallel, "until": until, "die_in": die_in},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=parallel.workers.max, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="feed", storage_path=str(folder), failure_config=FailureConfig(max_failures=1)),
        datasets={feed.NAME: stream},
        dataset_config=feed.Dealing(parallel),
    ).fit()


def test_what_is_left_is_dealt_after_a_crash_and_at_another_size(ray_session: Session, tmp_path: Path) -> None:
    table = packed_rows(ROWS, length=24, seed=7)
    files = (tmp_path / "train-0.parquet", tmp_path / "train-1.parquet")
    pq.write_table(table.slice(0, SPLIT[0]), files[0], row_group_size=3)
    pq.write_table(table.slice(SPLIT[0]), files[1], row_group_size=5)

    # Two workers with rows of their own; one dies in step 5, of which step 4 is committed.
    run(tmp_path, files, ParallelConfig(workers={"min": 2, "max": 2}), until=8, die_in=5)  # type: ignore[arg-type]
    assert (tmp_path / "asked").read_text().split() == ["0", "4"]
    # On another day two workers share one replica: one of them reads.
    run(tmp_path, files, ParallelConfig(tensor=2, workers={"min": 2, "max": 2}), until=STEPS)  # type: ignore[arg-type]
    assert (tmp_path / "asked").read_text().split() == ["0", "4", "8"]

    step, ledger = committed(tmp_path)
    found = audit(ledger, order(), step=step, batch=BATCH)
    assert (step, found.seen, found.lost, found.repeated, found.proven) == (STEPS, STEPS * BATCH, 0, 0, True)
    assert_rows(tmp_path, table)


def assert_rows(folder: Path, table: pa.Table) -> None:
    """Every group got the rows of its steps: those of the order, whoever got them."""
    tokens = table.column("input_ids").to_pylist()
    got: dict[tuple[int, int], list[list[int]]] = {}
    for path in sorted(folder.glob("got-*")):
        for line in path.read_text().splitlines():
            step, shares, ids = json.loads(line)
            got.setdefault((step, shares), []).append(ids)
    assert {step for step, shares in got if shares == 2} == set(range(8))
    assert {step for step, shares in got if shares == 1} == set(range(8, STEPS))
    for (step, _), rows in got.items():
        expected = [tokens[row] for row in order().rows_at(step * BATCH, (step + 1) * BATCH)]
        # Steps 4 and 5 were done twice, and on two ranks that share a replica each row arrives twice.
        assert {tuple(row) for row in rows} == {tuple(row) for row in expected}
        assert len(rows) in (BATCH, 2 * BATCH, 2 * BATCH - 1)
