"""Packed rows become the right tensors, and a feed can be entered at any step."""

import pyarrow as pa
import pytest

from actors.training.batching import MicroBatch, micro_batches
from actors.training.steps import StepPlan
from cluster.errors import TrainingError
from tests.actors.training.small import memory_feed


def test_lists_become_matrices_row_by_row(rows: pa.Table) -> None:
    batch = MicroBatch.from_arrow(rows.slice(3, 2))
    assert batch.input_ids.shape == (2, 24)
    assert batch.labels[1].tolist() == rows.column("labels")[4].as_py()
    fixed = pa.table(
        {name: pa.array(rows.column(name).to_pylist(), pa.list_(pa.int32(), 24)) for name in rows.column_names}
    )
    assert MicroBatch.from_arrow(fixed.slice(3, 2)).position_ids.equal(batch.position_ids)


def test_rows_of_unequal_length_are_refused() -> None:
    ragged = pa.table({name: [[1, 2], [3]] for name in ("input_ids", "labels", "position_ids")})
    with pytest.raises(TrainingError, match="different lengths"):
        MicroBatch.from_arrow(ragged)


def test_tokens_leave_padding_out(rows: pa.Table) -> None:
    content = sum(1 for row in rows.column("input_ids").to_pylist() for token in row if token != 0)
    assert MicroBatch.from_arrow(rows).tokens == content


def test_a_feed_entered_late_goes_on_as_one_from_the_start(rows: pa.Table) -> None:
    plan = StepPlan(rows=13, steps=9, global_batch_size=4, micro_batch_size=1, world_size=2)
    from_start = memory_feed(rows, rank=1)(plan, 0)
    first = [next(from_start).input_ids.tolist() for _ in range(9 * plan.accumulation)]
    for step in (1, 3, 5):
        late = memory_feed(rows, rank=1)(plan, step)
        assert [next(late).input_ids.tolist() for _ in range(6)] == first[step * 2 : step * 2 + 6]


def test_a_feed_that_ends_early_is_an_error_and_not_a_shorter_epoch(rows: pa.Table) -> None:
    plan = StepPlan(rows=13, steps=9, global_batch_size=4, micro_batch_size=1, world_size=1)
    feed = micro_batches(lambda: [rows.slice(0, 1)] * 5, plan, 0)
    with pytest.raises(TrainingError, match="5 micro-batches in an epoch that has 12"):
        list(feed)
