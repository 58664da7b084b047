from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from actors.registry.serving import ServingBook, ServingReport, Traffic
from cluster.database import open_engine, sqlite_uri

NINE = datetime(2026, 1, 1, 9, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


@pytest.fixture
def book(tmp_path: Path) -> Iterator[ServingBook]:
    engine = open_engine(sqlite_uri(tmp_path / "registry.db"))
    yield ServingBook(engine)
    engine.dispose()


def holds(*versions: str, replica: str = "llm#a") -> ServingReport:
    return ServingReport(source=replica, node="n1", holds=versions)


def test_a_holding_lasts_from_the_first_report_that_names_it_to_the_first_that_does_not(book: ServingBook) -> None:
    book.enter(holds("triage/1"), at=NINE)
    book.enter(holds("triage/1", "triage/2"), at=NINE + MINUTE)
    book.enter(holds("triage/2"), at=NINE + 2 * MINUTE)
    book.enter(holds("triage/1", "triage/2"), at=NINE + 3 * MINUTE)
    found = [(each.version_id, each.since, each.until) for each in book.read()[0]]
    assert found == [
        ("triage/1", NINE, NINE + 2 * MINUTE),
        ("triage/2", NINE + MINUTE, None),
        ("triage/1", NINE + 3 * MINUTE, None),
    ]


def test_a_replica_that_fell_silent_held_until_it_was_last_seen(book: ServingBook) -> None:
    book.enter(holds("triage/1"), at=NINE)
    book.enter(holds("triage/1", replica="llm#b"), at=NINE)
    book.enter(holds("triage/1"), at=NINE + MINUTE)
    book.enter(holds("triage/1", replica="llm#b"), at=NINE + 5 * MINUTE)
    book.close_unseen(before=NINE + 2 * MINUTE)
    assert {each.replica: each.until for each in book.read()[0]} == {"llm#a": NINE + MINUTE, "llm#b": None}


def test_a_gateway_that_reports_traffic_says_nothing_of_holdings(book: ServingBook) -> None:
    book.enter(holds("triage/1", replica="x"), at=NINE)
    book.enter(ServingReport(source="x", node="n", traffic=()), at=NINE + MINUTE)
    assert [each.until for each in book.read()[0]] == [None]


def test_totals_may_come_twice_and_those_of_several_gateways_are_added(book: ServingBook) -> None:
    def report(source: str, requests: int) -> ServingReport:
        row = Traffic(version_id="triage/1", hour=NINE, requests=requests, completion_tokens=10 * requests)
        return ServingReport(source=source, node="n", traffic=(row,))

    for each in (report("a", 2), report("a", 2), report("b", 1), report("a", 5), report("a", 4)):
        book.enter(each, at=NINE)
    (row,) = book.read()[1]
    assert (row.requests, row.completion_tokens) == (6, 60)


def test_a_second_book_on_the_same_tables_goes_on(book: ServingBook, tmp_path: Path) -> None:
    book.enter(holds("triage/1"), at=NINE)
    again = ServingBook(open_engine(sqlite_uri(tmp_path / "registry.db")))
    again.enter(holds("triage/1"), at=NINE + MINUTE)
    (held,) = again.read()[0]
    assert (held.since, held.seen) == (NINE, NINE + MINUTE)
