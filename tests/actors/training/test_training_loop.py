"""The recipe: accumulation changes nothing, a run that is cut off goes on exactly, bad numbers end it at once."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from actors.training import loop
from actors.training.config import TrainConfig
from actors.training.engine import Place
from actors.training.job import Outcome
from actors.training.loop import train
from actors.training.strategies.native import NativeEngine
from app.bench.gang import Gang
from cluster.errors import ConfigError, TrainingError
from cluster.signing import SignatureError
from cluster.storage import Home
from tests.actors.training.equivalence import follow
from tests.actors.training.small import HERE, Remembered, job, memory_feed, settings


def learn(
    config: TrainConfig,
    base: Path,
    rows: pa.Table,
    folder: Path,
    *,
    stop_after: int | None = None,
) -> tuple[Outcome, Remembered]:
    told = Remembered(stop_after)
    outcome = train(job(config, base, folder, rows.num_rows), HERE, memory_feed(rows), told)
    return outcome, told


def test_it_learns(tiny_base: Path, rows: pa.Table, tmp_path: Path) -> None:
    outcome, told = learn(settings(steps=40), tiny_base, rows, tmp_path)
    assert told.losses[-1] < told.losses[0] - 0.2
    assert outcome.position.loss_first == told.losses[0]
    assert outcome.position.loss_last == told.losses[-1]
    assert outcome.position.rows == 40 * 4
    assert outcome.checkpoint_id == "tiny-1/step-40"
    assert (outcome.adapter / "adapter_model.safetensors").is_file()


def test_one_batch_of_eight_is_eight_of_one(tiny_base: Path, rows: pa.Table, tmp_path: Path) -> None:
    traces = []
    for micro in (1, 8):
        optimizer = {"learning_rate": 2e-2, "global_batch_size": 8, "micro_batch_size": micro}
        _, told = learn(settings(optimizer=optimizer, steps=6), tiny_base, rows, tmp_path / str(micro))
        traces.append(told.losses)
    assert traces[0] == pytest.approx(traces[1], rel=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_run_cut_off_after_a_checkpoint_ends_as_if_it_had_not_been(
    tiny_base: Path, rows: pa.Table, tmp_path: Path, dropout: float
) -> None:
    config = settings(adapter={"r": 4, "alpha": 8, "dropout": dropout})
    whole, told = learn(config, tiny_base, rows, tmp_path / "whole")
    cut = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        learn(config, tiny_base, rows, cut, stop_after=4)
    resumed, told_later = learn(config, tiny_base, rows, cut)
    assert told_later.resumed_at == 4
    assert told_later.losses == told.losses[4:]
    assert resumed.position == whole.position
    weights = [load_file(outcome.adapter / "adapter_model.safetensors") for outcome in (whole, resumed)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def test_a_checkpoint_is_written_every_so_often_and_at_the_end(tiny_base: Path, rows: pa.Table, tmp_path: Path) -> None:
    config = settings(checkpoint={"every_steps": 3}, steps=7)
    _, told = learn(config, tiny_base, rows, tmp_path)
    assert [folder.name for folder in told.checkpoints] == ["step-000003", "step-000006", "step-000007"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".partial")]


def test_a_checkpoint_of_another_run_is_refused(tiny_base: Path, rows: pa.Table, tmp_path: Path) -> None:
    config = settings(steps=2)
    learn(config, tiny_base, rows, tmp_path)
    other = job(config, tiny_base, tmp_path, rows.num_rows, run_id="tiny-2")
    with pytest.raises(TrainingError, match="tiny-1"):
        train(other, HERE, memory_feed(rows), Remembered())


@pytest.mark.parametrize(
    ("damage", "reason"), [("flipped", "changed"), ("unsigned", "unsigned"), ("other home", "unknown_key")]
)
def test_a_base_that_nobody_vouches_for_is_not_read(
    tiny_base: Path, rows: pa.Table, tmp_path: Path, damage: str, reason: str
) -> None:
    base = shutil.copytree(tiny_base, tmp_path / "base")
    wanted = job(settings(steps=2), base, tmp_path / "run", rows.num_rows)
    [signature] = wanted.home.models.glob("*.sig")
    if damage == "flipped":
        weights = bytearray((base / "model.safetensors").read_bytes())
        weights[-1] ^= 1
        (base / "model.safetensors").write_bytes(weights)
    elif damage == "unsigned":
        signature.unlink()
    else:
        strangers = Home(tmp_path / "strangers")
        shutil.copytree(wanted.home.models, strangers.models)
        wanted = replace(wanted, home=strangers)
    with pytest.raises(SignatureError) as caught:
        train(wanted, HERE, memory_feed(rows), Remembered())
    assert caught.value.reason == reason
    assert not (tmp_path / "run").exists()


def test_bf16_follows_fp32(tiny_base: Path, rows: pa.Table, tmp_path: Path) -> None:
    _, exact = learn(settings(), tiny_base, rows, tmp_path / "fp32")
    _, rounded = learn(settings(precision="bf16"), tiny_base, rows, tmp_path / "bf16")
    assert rounded.losses == pytest.approx(exact.losses, rel=2e-2)


def test_numbers_that_run_away_end_the_run_with_advice(tiny_base: Path, rows: pa.Table, tmp_path: Path) -> None:
    optimizer = {"learning_rate": 1e30, "global_batch_size": 4, "max_grad_norm": 1e30}
    with pytest.raises(TrainingError, match=r"The loss became .* at step \d") as caught:
        learn(settings(optimizer=optimizer), tiny_base, rows, tmp_path)
    assert "learning_rate" in str(caught.value.hint)


def test_rows_without_a_loss_end_the_run(tiny_base: Path, rows: pa.Table, tmp_path: Path) -> None:
    silent_rows = rows.set_column(1, "labels", pa.array([[-100] * 24] * rows.num_rows, pa.list_(pa.int32())))
    with pytest.raises(TrainingError, match="no token to learn from"):
        learn(settings(), tiny_base, silent_rows, tmp_path)


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**64 - 1])
def test_every_seed_that_is_allowed_trains(tiny_base: Path, rows: pa.Table, tmp_path: Path, seed: int) -> None:
    table = rows.slice(0, 9)
    told = Remembered()
    train(
        job(settings(seed=seed, steps=2), tiny_base, tmp_path, table.num_rows),
        HERE,
        memory_feed(table, seed=seed),
        told,
    )
    assert len(told.losses) == 2


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**64])
def test_a_seed_that_torch_cannot_take_is_refused_in_the_settings(seed: int) -> None:
    with pytest.raises(ValidationError, match=r"seed\n.*(greater|less) than"):
        settings(seed=seed)


def walks(place: Place, config: TrainConfig, base: Path, rows: pa.Table) -> list[int]:
    """How often each step walks over all modules of a model. Work for `Gang.run`."""
    counts: list[int] = []
    walk, step = torch.nn.Module.named_modules, NativeEngine.step

    def counted_walk(self: torch.nn.Module, memo: object = None, *args: Any, **more: Any) -> Any:
        if memo is None and counts:
            counts[-1] += 1
        return walk(self, memo, *args, **more)  # type: ignore[arg-type]

    def counted_step(self: NativeEngine, *args: Any, **more: Any) -> Any:
        counts.append(0)
        return step(self, *args, **more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.nn.Module, "named_modules", counted_walk)
        patched.setattr(NativeEngine, "step", counted_step)
        follow(place, config, base, rows)
    return counts[1:-1]  # what the first one prepares, and the end of the run, are other things


def test_a_step_does_not_walk_over_the_modules(gang: Gang, tiny_base: Path, rows: pa.Table) -> None:
    """A model of 30 layers with an adapter has thousands: milliseconds in which a GPU has nothing to do."""
    assert set(walks(HERE, settings(), tiny_base, rows)) == {0}
    fsdp = settings(parallel={"strategy": "fsdp", "workers": {"min": 2, "max": 2}}, optimizer={"global_batch_size": 8})
    for counts in gang.run(2, walks, fsdp, tiny_base, rows):  # once when gradients begin to travel, once when they end
        assert set(counts) == {2}


@pytest.mark.parametrize("value", [hash((0, 1, 0, 0)), hash((-5, 7, 1, 0)), 2**64 - 1, -(2**63)])
def test_a_step_draws_what_torch_draws_of_its_seed(value: int) -> None:
    torch.manual_seed(value)
    drawn = torch.rand(4)
    loop._seed(HERE.device, value)
    assert torch.rand(4).equal(drawn)


def test_too_few_rows_are_the_users_to_mend(tiny_base: Path, rows: pa.Table, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 rows"):
        learn(settings(), tiny_base, rows.slice(0, 3), tmp_path)
