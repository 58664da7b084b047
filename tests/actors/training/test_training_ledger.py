"""The account of a run: whoever notes what in whichever order, it is one account, and nothing wrong passes."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.training.ledger import EpochAccount, Ledger, Notes, SampleFacts, Span, audit, sample_hash
from actors.training.order import Order
from actors.training.steps import StepPlan
from cluster.errors import TrainingError

unhurried = settings(max_examples=50, deadline=None)  # a busy machine is no failure
ORDER = Order(rows=30, epoch_rows=24, seed=3, chunk_rows=5, window_chunks=2)


def samples_of(row: int) -> list[str]:
    return [f"sample-{row}-{number}" for number in range(1 + row % 3)]


FACTS = SampleFacts(
    counts=np.array([len(samples_of(row)) for row in range(ORDER.rows)]),
    hashes=np.array([sum(map(sample_hash, samples_of(row))) % 2**64 for row in range(ORDER.rows)], dtype=np.uint64),
)


def note(notes: Notes, begin: int, end: int, order: Order = ORDER) -> None:
    rows = order.rows_at(begin, end)
    notes.add(np.arange(begin, end), rows, [sample for row in rows.tolist() for sample in samples_of(row)])


def account(*spans: tuple[int, int]) -> Ledger:
    """Of these positions, each span inside one epoch."""
    notes = Notes(ORDER)
    for begin, end in spans:
        note(notes, begin, end)
    return notes.take()


ledgers = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 23), st.integers(1, 24)).map(
        lambda drawn: (drawn[0] * 24 + drawn[1], drawn[0] * 24 + min(24, drawn[1] + drawn[2]))
    ),
    max_size=6,
).map(lambda spans: account(*spans))


@unhurried
@given(ledgers, ledgers, ledgers)
def test_merging_is_associative_and_commutative(a: Ledger, b: Ledger, c: Ledger) -> None:
    assert a.merge(b) == b.merge(a)
    assert a.merge(b).merge(c) == a.merge(b.merge(c))
    assert a.merge(Ledger(ORDER)) == a


@unhurried
@given(st.integers(1, 96), st.data())
def test_any_partition_of_a_run_makes_the_same_account(total: int, data: st.DataObject) -> None:
    """Cut anywhere, noted by any rank, gathered in any order."""
    cuts = sorted({0, total, *range(0, total, 24), *data.draw(st.lists(st.integers(0, total), max_size=10))})
    parts = list(itertools.pairwise(cuts))
    ranks = [Notes(ORDER) for _ in range(3)]
    for begin, end in data.draw(st.permutations(parts)):
        note(ranks[data.draw(st.integers(0, 2))], begin, end)
    gathered = Ledger(ORDER).merge_all(data.draw(st.permutations([rank.take() for rank in ranks])))
    assert gathered == account(*((begin, min(begin + 24, total)) for begin in range(0, total, 24)))
    result = audit(gathered, ORDER, step=total, batch=1, samples=FACTS)
    assert result.exact
    assert result.seen == total


@unhurried
@given(ledgers)
def test_an_account_survives_its_file(ledger: Ledger) -> None:
    assert Ledger.from_json(ledger.to_json()) == ledger


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 9, "order": {}, "epochs": []}', '{"format": 1}', "null"])
def test_a_file_that_is_no_account_is_said(text: str) -> None:
    with pytest.raises(TrainingError, match="cannot be read"):
        Ledger.from_json(text)


def test_an_account_is_small_however_long_the_run() -> None:
    order = Order(rows=10**6, epoch_rows=10**6, seed=0)
    gathered = Ledger(order)
    for step in range(0, 100_000, 1000):
        ranks = [Notes(order) for _ in range(4)]
        for rank, notes in enumerate(ranks):
            note(notes, step + rank * 250, step + (rank + 1) * 250, order)
        gathered = gathered.merge_all(notes.take() for notes in ranks)
    assert gathered.epochs[0].spans == (Span(0, 100_000, 1),)
    assert len(gathered.to_json()) < 400


def test_a_merge_works_on_what_is_new_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit of a run of a million steps over a small split costs what one of its first steps costs."""
    order = Order(rows=8, epoch_rows=8, seed=0)
    old = Ledger(order, {epoch: EpochAccount((Span(8 * epoch, 8 * epoch + 8, 1),)) for epoch in range(10_000)})
    merged: list[EpochAccount] = []
    original = EpochAccount.merge
    monkeypatch.setattr(EpochAccount, "merge", lambda self, other: merged.append(other) or original(self, other))
    segments = []
    for rank in range(4):
        notes = Notes(order)
        note(notes, 80_000 + 2 * rank, 80_002 + 2 * rank, order)
        segments.append(notes.take())
    merged.clear()
    assert old.merge_all(segments).epochs[10_000].spans == (Span(80_000, 80_008, 1),)
    assert len(merged) == 5


def test_what_is_noted_is_taken_once() -> None:
    notes = Notes(ORDER)
    note(notes, 0, 4)
    assert notes.take() == account((0, 4))
    assert notes.take() == Ledger(ORDER)


def test_accounts_of_other_orders_do_not_merge() -> None:
    with pytest.raises(TrainingError, match="another order before"):
        Ledger(ORDER).merge(Ledger(replace(ORDER, seed=4)))


def test_rows_that_are_lost_or_repeated_are_counted_where_they_are() -> None:
    ledger = account((0, 8), (12, 24), (24, 40), (36, 40))
    result = audit(ledger, ORDER, step=5, batch=8, samples=FACTS)
    assert (result.seen, result.lost, result.repeated) == (36, 4, 4)
    assert [(one.seen, one.lost, one.repeated) for one in result.epochs] == [(20, 4, 0), (16, 0, 4)]
    assert [one.unused for one in result.epochs] == [6, 6]
    assert result.proven  # the account is honest: it says itself what went wrong
    assert not result.exact


def test_rows_beyond_the_last_step_will_be_repeated() -> None:
    result = audit(account((0, 24), (24, 32)), ORDER, step=3, batch=8, samples=FACTS)
    assert (result.seen, result.lost, result.repeated) == (24, 0, 8)


def test_a_run_without_a_step_has_nothing_to_lose() -> None:
    assert audit(Ledger(ORDER), ORDER, step=0, batch=8, samples=FACTS).exact


def swapped(ledger: Ledger, **changes: int) -> Ledger:
    return Ledger(ORDER, {**ledger.epochs, 0: replace(ledger.epochs[0], **changes)})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "doubt"),
    [
        ({"rows_digest": 1}, "epoch 0: other rows were read"),
        ({"samples_digest": 1}, "epoch 0: other samples were read"),
        ({"samples": 1}, "epoch 0: other samples were read"),
    ],
)
def test_other_rows_than_the_seed_gives_are_no_proof(changes: dict[str, int], doubt: str) -> None:
    result = audit(swapped(account((0, 24)), **changes), ORDER, step=3, batch=8, samples=FACTS)
    assert not result.proven
    assert result.doubts[0].startswith(doubt)


def test_a_row_read_at_the_position_of_another_is_found() -> None:
    """The right rows in a wrong order: each epoch's order is part of the proof."""
    rows = ORDER.rows_at(0, 24)
    rows = rows[[1, 0, *range(2, 24)]]
    notes = Notes(ORDER)
    notes.add(np.arange(24), rows, [sample for row in rows.tolist() for sample in samples_of(row)])
    assert audit(notes.take(), ORDER, step=3, batch=8, samples=FACTS).doubts == (
        "epoch 0: other rows were read than stand at these positions",
    )


def test_an_audit_with_other_facts_proves_nothing() -> None:
    ledger = account((0, 24))
    assert "another order" in audit(ledger, replace(ORDER, seed=4), step=3, batch=8).doubts[0]
    fewer = SampleFacts(FACTS.counts[:-1], FACTS.hashes[:-1])
    assert audit(ledger, ORDER, step=3, batch=8, samples=fewer).doubts == ("the data version has 29 rows, not 30",)


def test_equal_accounts_are_written_alike() -> None:
    one = Ledger(ORDER, {0: EpochAccount((Span(0, 4, 1), Span(4, 8, 1)))})
    assert Ledger(ORDER).merge(one).epochs[0].spans == (Span(0, 8, 1),)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([(1, 2), (2, 4), (1, 2, 4)]))
def test_crashes_and_resizes_at_any_step_lose_no_row_and_repeat_none(seed: int, sizes: tuple[int, ...]) -> None:
    """The life of a run in its pure parts: groups of workers of any size that die anywhere, checkpoints at times."""
    draw = random.Random(seed)
    every = draw.randrange(1, 6)
    steps, batch = 20, 8
    order = Order(rows=30, epoch_rows=24, seed=seed, chunk_rows=4, window_chunks=3)
    committed, ledger, starts = 0, Ledger(order), 0
    while committed < steps:
        starts += 1
        shares = draw.choice(sizes)
        plan = StepPlan(rows=30, steps=steps, global_batch_size=batch, micro_batch_size=1, world_size=shares)
        notes = [Notes(order) for _ in range(shares)]
        dies_in = draw.randrange(committed, steps + 1) if starts < 30 else steps
        for step in range(committed, steps):
            for rank in range(shares):
                first = plan.first(step, rank)
                for index in range(plan.accumulation):
                    note(notes[rank], first + index, first + index + 1, order)
            if step == dies_in:
                break  # in the middle of a step, or after it: what was noted since the checkpoint dies with the group
            if (step + 1) % every == 0 or step + 1 == steps or draw.random() < 0.1:
                ledger = Ledger.from_json(ledger.to_json()).merge_all(one.take() for one in notes)
                committed = step + 1
    result = audit(ledger, order, step=committed, batch=batch, samples=FACTS)
    assert result.exact, result
    assert (result.seen, result.lost, result.repeated) == (steps * batch, 0, 0)
