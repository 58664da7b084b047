"""Two ranks save together, and any number of ranks in any layout goes on from it."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import torch.distributed
from safetensors.torch import load_file

from actors.training.checkpoint import shards
from actors.training.checkpoint.storage import FolderStorage
from actors.training.config import TrainConfig
from actors.training.engine import Place
from actors.training.job import Outcome
from actors.training.layout import Layout
from actors.training.loop import train
from app.bench.gang import Gang
from cluster.errors import CapacityError
from tests.actors.training.saved import at, blank, checkpoints, largest_file, resumed_step, save, spread, whole
from tests.actors.training.small import HERE, Remembered, job, memory_feed, settings

SHARDED_BY = {0: "__0_0.distcp", 1: "__1_0.distcp"}


def save_together(place: Place, folder: Path) -> dict[str, int]:
    """Three checkpoints, of which two are kept; meanwhile the ranks go on talking in the default group."""
    mine = checkpoints(folder, place, keep=2)
    assert mine.resume(blank(spread(place, 1))) is None
    for step in (1, 2, 3):
        mine.save(spread(place, step), at(step), ledger=f"ledger of {step}")
        for _ in range(20):
            torch.distributed.all_reduce(torch.ones(1000))
    mine.finish(insist=True)
    return {name: buffer.nbytes for name, buffer in mine._staging.buffers.items()}


def go_on(place: Place, folder: Path, along: int) -> int | None:
    state = blank(spread(place, 1, along=along))
    found = checkpoints(folder, place).resume(state)
    assert found is not None
    assert found.ledger == f"ledger of {found.position.step}"
    for name, tensor in state.items():
        assert (
            tensor.to_local().equal(spread(place, found.position.step, along=along)[name].to_local())
            if hasattr(tensor, "to_local")
            else tensor.equal(whole(found.position.step)[name])
        ), name
    return found.position.step


def test_two_ranks_save_and_any_number_goes_on(gang: Gang, tmp_path: Path) -> None:
    staged = gang.run(2, save_together, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]
    # A tensor that both ranks have is copied and written by one of them, from the second checkpoint on.
    everything = {name: tensor.nbytes for name, tensor in whole(1).items()}
    assert sum(sum(each.values()) for each in staged) == sum(everything.values())
    assert resumed_step(tmp_path) == 3
    assert gang.run(2, go_on, tmp_path, 0) == [3, 3]
    assert gang.run(2, go_on, tmp_path, 1) == [3, 3]  # spread along the other dimension
    # One rank's shard is damaged: all pass it over, also the rank that does not read it.
    shard = bytearray((tmp_path / "step-000003" / "__1_0.distcp").read_bytes())
    shard[len(shard) // 2] ^= 1
    (tmp_path / "step-000003" / "__1_0.distcp").write_bytes(shard)
    assert gang.run(2, go_on, tmp_path, 0) == [2, 2]


def test_what_one_rank_saved_two_go_on_from(gang: Gang, tmp_path: Path) -> None:
    save(checkpoints(tmp_path), 5)
    assert gang.run(2, go_on, tmp_path, 0) == [5, 5]


def break_off(place: Place, folder: Path) -> Any:
    """The disk of rank 1 is full in the middle of its shard; the one after that is saved."""
    mine = checkpoints(folder, place, model=None)
    big = {f"weights/{rank}": torch.full((400, 300), float(rank)) for rank in range(place.world_size)}
    ours = {f"weights/{place.rank}": big[f"weights/{place.rank}"]}
    with largest_file(100_000 if place.rank == 1 else 10**9):
        mine.save(ours, at(1))
        first = mine.finish()
    mine.save(ours, at(2))
    second = mine.finish(insist=True)
    return first, second, torch.distributed.get_world_size()


def test_a_disk_that_is_full_for_one_rank_stops_the_save_of_all(gang: Gang, tmp_path: Path) -> None:
    for first, second, _ in gang.run(2, break_off, tmp_path):
        assert isinstance(first.failed, CapacityError)
        assert second.failed is None
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]
    assert FolderStorage(tmp_path).listing()["step-000002"].keys() >= set(SHARDED_BY.values())


def test_a_rank_reads_only_its_own_part(gang: Gang, tmp_path: Path) -> None:
    gang.run(2, save_together, tmp_path)
    assert gang.run(2, files_needed, tmp_path / "step-000003") == [["__0_0.distcp"], ["__1_0.distcp"]]


def files_needed(place: Place, folder: Path) -> list[str]:

    only = {
        name: tensor for name, tensor in spread(place, 1).items() if hasattr(tensor, "to_local") and "q.lora_A" in name
    }
    return sorted(shards.needed(folder, only))


STEPS, HALF = 6, 3


def live(place: Place, config: TrainConfig, base: Path, rows: pa.Table, folder: Path) -> tuple[list[float], Path]:
    """A run of the real loop, which goes on if it has checkpoints: its losses (on rank 0), and what it has learnt."""
    told = Remembered()
    feed = memory_feed(rows, Layout.of(config.parallel, place.world_size).data_rank(place.rank))
    outcome = train(job(config, base, folder, rows.num_rows), place, feed, told)
    assert isinstance(outcome, Outcome)
    return told.losses, outcome.adapter / "adapter_model.safetensors"


@pytest.mark.parametrize("parallel", [{"strategy": "fsdp"}, {"strategy": "zero3"}, {"pipeline": 2}], ids=str)
def test_a_run_goes_on_at_another_world_size_and_strategy(
    gang: Gang, tiny_base: Path, rows: pa.Table, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    """From two ranks to one process, and from one process to two ranks: the same losses as undisturbed."""

    def config(**axes: object) -> TrainConfig:
        return settings(steps=STEPS, checkpoint={"every_steps": HALF}, parallel=axes)

    alone, spread_over_two = config(), config(workers={"min": 2, "max": 2}, **parallel)
    losses, weights = live(HERE, alone, tiny_base, rows, tmp_path / "one")
    learnt = load_file(weights)
    gang.run(2, live, spread_over_two, tiny_base, rows, tmp_path / "two")
    for folder in ("one", "two"):
        FolderStorage(tmp_path / folder).remove(f"step-{STEPS:06d}")
    on_one = live(HERE, alone, tiny_base, rows, tmp_path / "two")
    on_two, _ = gang.run(2, live, spread_over_two, tiny_base, rows, tmp_path / "one")
    for losses_later, weights_later in (on_one, on_two):
        assert losses_later == pytest.approx(losses[HALF:], rel=1e-5)
        for name, tensor in load_file(weights_later).items():
            torch.testing.assert_close(tensor, learnt[name], rtol=1e-3, atol=5e-4)
