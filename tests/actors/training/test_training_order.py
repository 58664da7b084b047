"""The order of a run: every row once in each epoch, found anywhere at once, and the same for ever."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.data.version import ROWS_PER_GROUP, ROWS_PER_SHARD
from actors.training.order import Order
from actors.training.steps import StepPlan

unhurried = settings(max_examples=50, deadline=None)  # a busy machine is no failure


@st.composite
def orders(draw: st.DrawFn) -> Order:
    rows = draw(st.integers(1, 200))
    return Order(
        rows=rows,
        epoch_rows=draw(st.integers(1, rows)),
        seed=draw(st.integers(-5, 2**70)),
        shuffle=draw(st.booleans()),
        chunk_rows=draw(st.integers(1, 30)),
        window_chunks=draw(st.integers(1, 6)),
    )


@unhurried
@given(orders(), st.integers(0, 3))
def test_an_epoch_has_no_row_twice(order: Order, epoch: int) -> None:
    rows = order.rows_at(epoch * order.epoch_rows, (epoch + 1) * order.epoch_rows)
    assert len(set(rows.tolist())) == order.epoch_rows
    assert set(rows.tolist()) <= set(range(order.rows))


@unhurried
@given(orders(), st.integers(0, 400), st.integers(0, 300))
def test_a_position_has_its_row_wherever_one_begins_to_read(order: Order, begin: int, count: int) -> None:
    from_start = order.rows_at(0, begin + count)
    assert order.rows_at(begin, begin + count).tolist() == from_start[begin:].tolist()


@unhurried
@given(orders(), st.integers(0, 400), st.integers(0, 300))
def test_a_piece_lies_in_few_chunks(order: Order, begin: int, count: int) -> None:
    """What has to be in memory at once does not grow with the data."""
    expected = begin
    for piece in order.pieces(begin, begin + count):
        assert piece.position == expected
        assert len(set((piece.rows // order.chunk_rows).tolist())) <= order.window_chunks
        expected += len(piece.rows)
    assert expected == begin + count


def test_the_seed_and_the_epoch_make_the_order() -> None:
    order = Order(rows=1000, epoch_rows=1000, seed=1)
    first, second = order.rows_at(0, 1000), order.rows_at(1000, 2000)
    assert first.tolist() != second.tolist()
    assert first.tolist() == Order(rows=1000, epoch_rows=1000, seed=1).rows_at(0, 1000).tolist()
    assert first.tolist() != Order(rows=1000, epoch_rows=1000, seed=2).rows_at(0, 1000).tolist()


def test_without_shuffling_every_epoch_is_the_split_in_its_own_order() -> None:
    order = Order(rows=600, epoch_rows=592, seed=1, shuffle=False)
    assert order.rows_at(0, 592 * 2).tolist() == list(range(592)) * 2


def test_each_epoch_leaves_other_rows_out() -> None:
    plan = StepPlan(rows=1003, steps=500, global_batch_size=8, micro_batch_size=1, world_size=1)
    order = Order.of(plan, seed=0, shuffle=True)
    unused = [set(range(1003)) - set(order.rows_at(e * 1000, (e + 1) * 1000).tolist()) for e in range(20)]
    assert all(len(rows) == 3 for rows in unused)
    assert len(set().union(*unused)) > 40


def test_rows_are_well_mixed() -> None:
    """A row's neighbours come from all over its window, and the window from all over the split."""
    order = Order(rows=100_000, epoch_rows=100_000, seed=0)
    rows = order.rows_at(0, 100_000)
    assert np.median(np.abs(np.diff(rows))) > 10_000
    assert abs(np.corrcoef(np.arange(100_000), rows)[0, 1]) < 0.1


@pytest.mark.parametrize(
    ("epoch", "rows"),
    [(0, [91, 1718, 1116, 2906, 1704, 677, 2798, 766]), (3, [2833, 1827, 1252, 1900, 756, 483, 2665, 2973])],
)
def test_an_order_once_used_never_changes(epoch: int, rows: list[int]) -> None:
    """A run that was begun with one release goes on with the next: these numbers are not to be updated."""
    order = Order(rows=3000, epoch_rows=2992, seed=7)
    assert order.rows_at(epoch * 2992, epoch * 2992 + 8).tolist() == rows


def test_a_chunk_is_a_row_group_of_what_prepare_writes() -> None:
    assert Order(rows=1, epoch_rows=1, seed=0).chunk_rows == ROWS_PER_GROUP
    assert ROWS_PER_SHARD % ROWS_PER_GROUP == 0
