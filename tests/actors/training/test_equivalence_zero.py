"""ZeRO learns what one process learns, and its state goes to and from every other engine."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed
from pydantic import ValidationError

from actors.training import engine, optimizer
from actors.training.batching import NO_LOSS, MicroBatch
from actors.training.config import TrainConfig
from actors.training.engine import Place
from actors.training.layout import Layout
from actors.training.objectives import sft
from actors.training.steps import StepPlan
from app.bench.gang import Gang
from tests.actors.training.equivalence import STEPS, laid_out, mesh_settings, summed, whole
from tests.actors.training.small import HERE, memory_feed

FULL = {"adapter": {"kind": "none"}}
HALF = STEPS // 2
FEW = 3
ZERO = ("zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Run:
    """Loss and gradient norm of some steps, and the whole state before the first and after the last."""

    losses: list[float]
    norms: list[float]
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]


def drive(
    place: Place,
    config: TrainConfig,
    base: Path,
    rows: pa.Table,
    start: int = 0,
    stop: int = STEPS,
    given: dict[str, np.ndarray] | None = None,
) -> Run:
    """Steps `start` to `stop`, from the state `given`, as the loop makes them. Work for `Gang.run`."""
    layout = Layout.of(config.parallel, place.world_size)
    sizes = config.optimizer
    plan = StepPlan(rows.num_rows, config.steps, sizes.global_batch_size, sizes.micro_batch_size, layout.data)
    trained = engine.build(config, base, base.name, place, layout)
    if given is not None:
        trained.load({name: laid_out(given[name], now) for name, now in trained.state().items()}, start)
    run = Run([], [], _whole(trained.state()), {})
    batches = memory_feed(rows, layout.data_rank(place.rank))(plan, start)
    for step in range(start, stop):
        micro = [next(batches) for _ in range(plan.accumulation)]
        counted = summed(place, sum(map(sft.count_loss_tokens, micro)))
        result = trained.step(
            micro, loss_tokens=counted, learning_rate=optimizer.learning_rate(sizes, step, plan.steps)
        )
        run.losses.append(summed(place, result.loss_sum) / counted)
        run.norms.append(result.grad_norm)
    run.after.update(_whole(trained.state()))
    trained.close()
    return run


def lopsided(place: Place, config: TrainConfig, base: Path, labels: list[list[int]]) -> tuple[float, float]:
    """One step in which rank r of two has the micro-batch of `labels[r]`, and one process has both."""
    layout = Layout.of(config.parallel, place.world_size)
    trained = engine.build(config, base, base.name, place, layout)
    ids = torch.arange(1, 1 + len(labels[0]))[None]
    micro = [MicroBatch(ids, torch.tensor([each]), ids - 1) for each in labels]
    mine = micro if place.world_size == 1 else [micro[place.rank]]
    counted = sum(map(sft.count_loss_tokens, micro))
    result = trained.step(mine, loss_tokens=counted, learning_rate=1e-3)
    trained.close()
    return summed(place, result.loss_sum) / counted, result.grad_norm


def _whole(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: whole(each).numpy() for name, each in state.items()}


def sharded(strategy: str, workers: int = 2, offload: str = "none", **changes: Any) -> TrainConfig:
    return mesh_settings(
        parallel={"strategy": strategy, "workers": {"min": workers, "max": workers}, "offload": offload}, **changes
    )


def assert_same(found: Run, wanted: Run, *, rel: float = 1e-5) -> None:
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=rel)
    np.testing.assert_allclose(found.norms, wanted.norms, rtol=rel)
    assert found.after.keys() == wanted.after.keys()
    for name, values in found.after.items():
        # A weight whose gradient is nothing but rounding moves by up to the learning rate; its moments stay small.
        np.testing.assert_allclose(values, wanted.after[name], rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.fixture(scope="module")
def alone(tiny_base: Path, rows: pa.Table) -> Callable[..., Run]:
    """A run of one process; made once for each of its settings."""
    made: dict[str, Run] = {}

    def run(stop: int = STEPS, **changes: Any) -> Run:
        config = mesh_settings(**changes)
        key = f"{stop} {config.model_dump_json()}"
        if key not in made:
            made[key] = drive(HERE, config, tiny_base, rows, stop=stop)
        return made[key]

    return run


@pytest.mark.parametrize("changes", [{}, FULL], ids=["lora", "full"])
@pytest.mark.parametrize("strategy", ZERO)
def test_two_ranks_learn_what_one_process_learns(
    gang: Gang, strategy: str, changes: dict[str, Any], tiny_base: Path, rows: pa.Table, alone: Callable[..., Run]
) -> None:
    found, other = gang.run(2, drive, sharded(strategy, **changes), tiny_base, rows)
    assert_same(found, alone(**changes))
    assert other.norms == found.norms
    for name, values in found.before.items():  # moments exist before the first step
        assert name.startswith("weights/") or not values.any()


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_the_optimizer_may_live_on_the_cpu(
    gang: Gang, strategy: str, tiny_base: Path, rows: pa.Table, alone: Callable[..., Run]
) -> None:
    found, _ = gang.run(2, drive, sharded(strategy, offload="cpu"), tiny_base, rows, 0, FEW)
    assert_same(found, alone(FEW))


@pytest.mark.parametrize(
    ("strategy", "max_grad_norm"), [("zero1", 1e-2), ("zero2", 1e3), ("zero3", 1e-2), ("zero3", 1e3)]
)
def test_clipping(
    gang: Gang, strategy: str, max_grad_norm: float, tiny_base: Path, rows: pa.Table, alone: Callable[..., Run]
) -> None:
    sizes = {"optimizer": {"learning_rate": 5e-3, "global_batch_size": 8, "max_grad_norm": max_grad_norm}}
    found, _ = gang.run(2, drive, sharded(strategy, **sizes), tiny_base, rows, 0, FEW)
    wanted = alone(FEW, **sizes)
    assert_same(found, wanted)
    assert (max(wanted.norms) < max_grad_norm) or (min(wanted.norms) > max_grad_norm)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_micro_batches_of_one_are_one_batch(
    gang: Gang, strategy: str, tiny_base: Path, rows: pa.Table, alone: Callable[..., Run]
) -> None:
    """2 ranks × 1 micro-batch of 4 rows against 1 rank × 8 of one, with decaying weights."""
    sizes = {"learning_rate": 5e-3, "global_batch_size": 8, "weight_decay": 0.1}
    config = sharded(strategy, **FULL, optimizer={**sizes, "micro_batch_size": 4})
    found, _ = gang.run(2, drive, config, tiny_base, rows, 0, FEW)
    assert_same(found, alone(FEW, **FULL, optimizer={**sizes, "micro_batch_size": 1}))


@pytest.mark.parametrize("strategy", ZERO)
def test_a_rank_may_have_nothing_to_learn_from(gang: Gang, strategy: str, tiny_base: Path) -> None:
    labels = [[NO_LOSS] * 6, [NO_LOSS, 5, 9, 3, NO_LOSS, 7]]
    plain = sharded(strategy, optimizer={"global_batch_size": 2})
    wanted = lopsided(HERE, mesh_settings(optimizer={"global_batch_size": 2}), tiny_base, labels)
    for found in gang.run(2, lopsided, plain, tiny_base, labels):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("zero3", 2), ("fsdp", 2)),
        (("ddp", 2), ("zero3", 2)),
        (("zero3", 2), ("zero2", 1)),
        (("zero1", 1), ("zero3", 2)),
    ],
    ids=str,
)
def test_a_run_goes_on_under_another_strategy_and_world_size(
    gang: Gang,
    first: tuple[str, int],
    then: tuple[str, int],
    tiny_base: Path,
    rows: pa.Table,
    alone: Callable[..., Run],
) -> None:
    began = gang.run(first[1], drive, sharded(*first, **FULL), tiny_base, rows, 0, HALF)[0]
    ended = gang.run(then[1], drive, sharded(*then, **FULL), tiny_base, rows, HALF, STEPS, began.after)[0]
    for name, values in ended.before.items():
        np.testing.assert_array_equal(values, began.after[name], err_msg=name)
    whole = Run(began.losses + ended.losses, began.norms + ended.norms, {}, ended.after)
    assert_same(whole, alone(**FULL))


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [("zero1", {}), ("zero2", FULL), ("zero3", {}), ("zero3", FULL)],
    ids=["zero1-lora", "zero2-full", "zero3-lora", "zero3-full"],
)
def test_bf16_keeps_what_learns_in_fp32(
    gang: Gang, strategy: str, changes: dict[str, Any], tiny_base: Path, rows: pa.Table, alone: Callable[..., Run]
) -> None:
    found, _ = gang.run(2, drive, sharded(strategy, precision="bf16", **changes), tiny_base, rows, 0, FEW)
    wanted = alone(FEW, precision="bf16", **changes)
    for name, values in found.before.items():  # nothing of what learns was rounded on the way in
        np.testing.assert_array_equal(values, wanted.before[name], err_msg=name)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-3)
    np.testing.assert_allclose(found.norms, wanted.norms, rtol=3e-2)


def test_what_zero_cannot_do_is_refused_in_the_settings() -> None:
    with pytest.raises(ValidationError, match="compiles over and over"):
        sharded("zero3", compile=True)
    with pytest.raises(ValidationError, match="without pipeline 2"):
        mesh_settings(parallel={"strategy": "zero1", "pipeline": 2, "workers": {"min": 2, "max": 2}})
    assert sharded("zero2", compile=True).compile
