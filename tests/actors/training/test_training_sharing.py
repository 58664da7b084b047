"""Ranks that work on the same rows get them from the one that reads, over real process groups."""

from collections.abc import Iterator

import pyarrow as pa
import pytest

from actors.training import sharing
from actors.training.batching import MicroBatch
from actors.training.engine import Place
from actors.training.layout import Layout
from actors.training.steps import StepPlan
from app.bench.gang import Gang
from cluster.errors import TrainingError
from tests.actors.training.small import memory_feed

LAYOUTS = [Layout(replicate=2, tensor=2), Layout(pipeline=2, shard=2)]
PLAN = StepPlan(rows=13, steps=5, global_batch_size=4, micro_batch_size=1, world_size=2)


def receive(place: Place, layout: Layout, rows: pa.Table) -> list[list[int]]:
    """What this rank gets, to the end; only readers touch the feed."""
    reader, share = layout.reader(place.rank), layout.data_rank(place.rank)
    own = memory_feed(rows, share)(PLAN, 1) if place.rank == reader else None
    group = sharing.group(layout)
    received = list(sharing.shared(own, reader=reader, group=group))
    assert all((batch.origin is not None) == (place.rank == reader) for batch in received)
    return [batch.input_ids.tolist() + batch.labels.tolist() + batch.position_ids.tolist() for batch in received]


def fail(place: Place, rows: pa.Table, after: int) -> str:
    """The reader's feed breaks after some micro-batches."""

    def broken() -> Iterator[MicroBatch]:
        for number, batch in enumerate(memory_feed(rows)(PLAN, 0)):
            if number == after:
                raise TrainingError("The disk is gone.")
            yield batch

    group = sharing.group(Layout(tensor=2))
    received = 0
    try:
        for _ in sharing.shared(broken() if place.rank == 0 else None, reader=0, group=group):
            received += 1
    except TrainingError as error:
        assert received == after
        return error.message
    return "no error"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_of_a_replica_get_what_their_reader_reads(gang: Gang, rows: pa.Table, layout: Layout) -> None:
    received = gang.run(4, receive, layout, rows)
    for rank, batches in enumerate(received):
        expected = [
            batch.input_ids.tolist() + batch.labels.tolist() + batch.position_ids.tolist()
            for batch in memory_feed(rows, layout.data_rank(rank))(PLAN, 1)
        ]
        assert batches == expected
    assert received[0] != received[layout.readers[1]]


@pytest.mark.parametrize("after", [0, 2])
def test_a_feed_that_fails_fails_on_every_rank(gang: Gang, rows: pa.Table, after: int) -> None:
    said = gang.run(2, fail, rows, after)
    assert said == ["The disk is gone.", "Rank 0, which reads the rows of this rank, failed."]
