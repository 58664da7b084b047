"""Packed rows become the right tensors; a rank gets the rows that the plan gives it, and no others."""

from collections.abc import Iterator

import pyarrow as pa
import pytest

from actors.training.batching import MicroBatch, micro_batches
from actors.training.order import Order
from actors.training.steps import COLUMNS, StepPlan
from cluster.errors import TrainingError
from tests.actors.training.small import memory_feed, shares


def plan(world_size: int = 2) -> StepPlan:
    return StepPlan(rows=13, steps=9, global_batch_size=4, micro_batch_size=1, world_size=world_size)


def test_lists_become_matrices_row_by_row(rows: pa.Table) -> None:
    batch = MicroBatch.from_arrow(rows.slice(3, 2))
    assert batch.input_ids.shape == (2, 24)
    assert batch.labels[1].tolist() == rows.column("labels")[4].as_py()
    fixed = pa.table({name: pa.array(rows.column(name).to_pylist(), pa.list_(pa.int32(), 24)) for name in COLUMNS})
    assert MicroBatch.from_arrow(fixed.slice(3, 2)).position_ids.equal(batch.position_ids)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ([[1, 2], [3]], "different lengths"),
        ([[1, 2, 3], [4]], "different lengths"),  # as many in all as two rows of two
        ([[1, 2], None], "different lengths"),
        ([[1, 2, 3], [4, 5, 6]], "different lengths"),  # than the other columns
        ([[1, 2], [3, None]], "gaps"),
        ([[1.5, 2.0], [3.0, 4.0]], "whole numbers"),
    ],
)
def test_rows_that_make_no_matrix_are_refused(broken: list[object], said: str) -> None:
    table = pa.table({name: [[1, 2], [3, 4]] for name in COLUMNS})
    assert MicroBatch.from_arrow(table).labels.tolist() == [[1, 2], [3, 4]]
    with pytest.raises(TrainingError, match=said):
        MicroBatch.from_arrow(table.set_column(1, "labels", pa.array(broken)))


def test_tokens_leave_padding_out(rows: pa.Table) -> None:
    content = sum(1 for row in rows.column("input_ids").to_pylist() for token in row if token != 0)
    assert MicroBatch.from_arrow(rows).tokens == content


def test_a_feed_entered_late_goes_on_as_one_from_the_start(rows: pa.Table) -> None:
    from_start = [batch.input_ids.tolist() for batch in memory_feed(rows, rank=1)(plan(), 0)]
    assert len(from_start) == 9 * plan().accumulation
    for step in (1, 3, 8):
        late = memory_feed(rows, rank=1)(plan(), step)
        assert [batch.input_ids.tolist() for batch in late] == from_start[step * 2 :]


def test_a_micro_batch_says_where_its_rows_come_from(rows: pa.Table) -> None:
    order = Order.of(plan(), seed=0, shuffle=True)
    for batch in memory_feed(rows, rank=1)(plan(), 2):
        assert batch.origin is not None
        [position], [row] = batch.origin.positions.tolist(), batch.origin.rows.tolist()
        assert row == order.rows_at(position, position + 1)[0]
        assert list(batch.origin.samples) == rows.column("sample_ids")[row].as_py()
        assert batch.input_ids[0].tolist() == rows.column("input_ids")[row].as_py()


def test_steps_before_the_start_are_dropped(rows: pa.Table) -> None:
    batches = micro_batches(shares(rows, plan(), 1, 1), plan(), rank=1, start=4)
    assert next(batches).origin.positions.tolist() == [4 * 4 + 2]  # type: ignore[union-attr]


def gap(dealt: list[pa.Table]) -> list[pa.Table]:
    return [dealt[0], *dealt[2:]]


def again(dealt: list[pa.Table]) -> list[pa.Table]:
    return [dealt[0], *dealt]


def short(dealt: list[pa.Table]) -> list[pa.Table]:
    return [dealt[0], dealt[1].slice(0, 1), *dealt[2:]]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (gap, "rank 1 of 2 positions 10 to 11 where step 2 takes positions 6 to 7"),
        (again, "rank 1 of 2 positions 2 to 3 where step 2 takes positions 6 to 7"),
        (short, "rank 1 of 2 positions 6 to 6 where step 2 takes positions 6 to 7"),
    ],
)
def test_other_rows_than_the_plans_are_an_error_that_names_both(rows: pa.Table, wrong: object, said: str) -> None:
    assert callable(wrong)
    dealt: Iterator[pa.Table] = iter(wrong(list(shares(rows, plan(), 1, 0))))
    with pytest.raises(TrainingError, match=said) as caught:
        list(micro_batches(dealt, plan(), rank=1, start=0))
    assert caught.value.retryable


def test_the_rows_of_another_rank_are_an_error(rows: pa.Table) -> None:
    with pytest.raises(TrainingError, match="rank 1 of 2 positions 0 to 1 where step 1 takes positions 2 to 3"):
        list(micro_batches(shares(rows, plan(), 0, 0), plan(), rank=1, start=0))


def test_a_feed_that_begins_too_late_is_an_error(rows: pa.Table) -> None:
    with pytest.raises(TrainingError, match="positions 14 to 15 where step 3 takes positions 10 to 11"):
        list(micro_batches(shares(rows, plan(), 1, 3), plan(), rank=1, start=2))


def test_a_feed_that_ends_early_is_an_error_and_not_a_shorter_run(rows: pa.Table) -> None:
    dealt = list(shares(rows, plan(), 0, 0))[:5]
    with pytest.raises(TrainingError, match="ended before step 6, which takes positions 20 to 21"):
        list(micro_batches(dealt, plan(), rank=0, start=0))
