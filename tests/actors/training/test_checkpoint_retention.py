"""Which checkpoints may go: the newest, the best and the needed stay, and never is none left."""

import math
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.training.checkpoint.manifest import Checkpoint, name_of, step_of
from actors.training.checkpoint.retention import to_remove
from actors.training.config import CheckpointConfig
from actors.training.job import Position


def checkpoint(step: int, **metrics: float) -> Checkpoint:
    position = Position("run", step=step, rows=step, loss_first=1.0, loss_last=1.0, loss_tokens=step)
    return Checkpoint(name_of(step), position, metrics, datetime(2026, 1, 1, tzinfo=UTC), files={})


def policy(newest: int, /, **best: object) -> CheckpointConfig:
    return CheckpointConfig.model_validate({"keep": newest, "best": best or None})


def gone(steps: dict[int, float], rule: CheckpointConfig, *protected: int) -> list[int]:
    there = [checkpoint(step, loss=loss) for step, loss in steps.items()]
    return [each.step for each in to_remove(there, rule, protected)]


@pytest.mark.parametrize(
    ("rule", "protected", "removed"),
    [
        (policy(1), (), [1, 2, 3]),
        (policy(3), (), [1]),
        (policy(9), (), []),
        (policy(1), (2,), [1, 3]),
        (policy(1), (7,), [1, 2, 3]),
        (policy(1, metric="loss"), (), [1, 3]),
        (policy(1, metric="loss", mode="max"), (), [1, 2]),
        (policy(1, metric="loss", keep=3), (), [3]),
        (policy(1, metric="unknown"), (), [1, 2, 3]),
    ],
)
def test_the_newest_the_best_and_the_needed_stay(
    rule: CheckpointConfig, protected: tuple[int, ...], removed: list[int]
) -> None:
    assert gone({2: 0.1, 4: 0.15, 1: 0.2, 3: 0.3}, rule, *protected) == removed


def test_nan_is_never_best_and_of_equals_the_newer_stays() -> None:
    losses = {1: 0.5, 2: 0.5, 3: math.nan, 4: 0.9}
    assert gone(losses, policy(1, metric="loss")) == [1, 3]
    assert gone(losses, policy(1, metric="loss", mode="max", keep=4)) == [3]


@given(
    st.dictionaries(st.integers(0, 30), st.floats(allow_nan=True), min_size=1),
    st.integers(1, 5),
    st.sets(st.integers(0, 30)),
    st.none() | st.fixed_dictionaries({"mode": st.sampled_from(["min", "max"]), "keep": st.integers(1, 3)}),
)
def test_what_holds_for_any_run(
    steps: dict[int, float], keep: int, protected: set[int], best: dict[str, object] | None
) -> None:
    removed = set(gone(steps, CheckpointConfig.model_validate({"keep": keep, "best": best}), *protected))
    left = steps.keys() - removed
    assert max(steps) in left
    assert protected & steps.keys() <= left
    assert set(sorted(steps)[-keep:]) <= left
    assert len(left - protected) <= keep + (int(str(best["keep"])) if best else 0)


def test_names() -> None:
    assert step_of(name_of(40)) == 40
    assert name_of(40) == "step-000040"
    assert step_of(name_of(12345678)) == 12345678
    assert [step_of(name) for name in ("step-", "step-1a", ".partial-step-000001-ab", "../step-000001")] == [None] * 4
