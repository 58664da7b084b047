"""A step takes the next positions of the run, the same ones at every world size."""

import pytest

from actors.training.steps import StepPlan
from cluster.errors import ConfigError


def plan(world_size: int = 1, micro: int = 1, rows: int = 50) -> StepPlan:
    return StepPlan(rows=rows, steps=20, global_batch_size=8, micro_batch_size=micro, world_size=world_size)


@pytest.mark.parametrize(("world_size", "micro"), [(1, 1), (1, 8), (2, 1), (2, 4), (4, 2), (8, 1)])
def test_a_step_takes_the_next_global_batch_whatever_the_world_size(world_size: int, micro: int) -> None:
    spread = plan(world_size, micro)
    assert spread.share == micro * spread.accumulation
    taken = [
        spread.first(step, rank) + index
        for step in range(spread.steps)
        for rank in range(world_size)
        for index in range(spread.share)
    ]
    assert taken == list(range(spread.positions))


def test_rows_that_fill_no_batch_are_left_out() -> None:
    assert plan(rows=50).steps_per_epoch == 6
    assert plan(rows=50).rows_per_epoch == 48


def test_fewer_rows_than_a_batch_is_the_users_to_mend() -> None:
    with pytest.raises(ConfigError, match=r"7 rows, fewer than one global batch of 8") as caught:
        plan(rows=7)
    assert "global_batch_size" in str(caught.value.hint)


def test_a_batch_that_workers_cannot_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 workers"):
        plan(world_size=3)
