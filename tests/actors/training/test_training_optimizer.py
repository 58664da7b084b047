"""The schedule's shape: up in a line, then down, and never a step at rate 0."""

from itertools import pairwise

import pytest

from actors.training.config import OptimizerConfig
from actors.training.optimizer import learning_rate


def rates(schedule: str, warmup_ratio: float = 0.1, steps: int = 50) -> list[float]:
    config = OptimizerConfig.model_validate({"learning_rate": 1e-3, "schedule": schedule, "warmup_ratio": warmup_ratio})
    return [learning_rate(config, step, steps) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_the_warm_up_is_a_line_to_the_peak(schedule: str) -> None:
    assert rates(schedule)[:5] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3])
    assert max(rates(schedule)) == pytest.approx(1e-3)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_after_the_peak_it_only_falls_and_the_last_step_still_learns(schedule: str) -> None:
    falling = rates(schedule)[5:]
    assert all(later < earlier for earlier, later in pairwise(falling))
    assert 0 < falling[-1] < 1e-4


def test_cosine_is_half_way_down_in_the_middle() -> None:
    assert rates("cosine", warmup_ratio=0, steps=100)[50] == pytest.approx(5e-4)


def test_constant_stays() -> None:
    assert set(rates("constant", warmup_ratio=0)) == {1e-3}


def test_a_run_of_one_step_learns() -> None:
    assert rates("cosine", warmup_ratio=0.5, steps=1) == [1e-3]
