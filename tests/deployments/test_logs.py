"""Where a replica's lines go, and that each says whose request it is about. The loggers are put back afterwards."""

import asyncio
import logging
from collections.abc import Iterator

import pytest

from deployments.logs import about, join_serve

NAMES = ("ray.serve", "deployments", "actors", "cluster")


class Kept(logging.Handler):
    """Stands where Serve's file is."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str | None]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.getMessage(), getattr(record, "request_id", None)))


@pytest.fixture
def kept() -> Iterator[Kept]:
    loggers = [logging.getLogger(name) for name in NAMES]
    before = [(each.handlers, each.filters, each.level, each.propagate) for each in loggers]
    handler = Kept()
    loggers[0].handlers, loggers[0].filters = [handler], []
    loggers[0].setLevel(logging.INFO)
    yield handler
    for each, (handlers, filters, level, propagate) in zip(loggers, before, strict=True):
        each.handlers, each.filters, each.propagate = handlers, filters, propagate
        each.setLevel(level)


async def test_every_line_about_a_request_has_its_id_and_no_other_has(kept: Kept) -> None:
    join_serve()

    async def later() -> None:
        await asyncio.sleep(0.01)
        logging.getLogger("deployments.llm.adapters").warning("from a task of %s", "its own")

    async def handle(request_id: str) -> None:
        with about(request_id):
            logging.getLogger("deployments.gateway.scope").info("begun")
            task = asyncio.create_task(later())
            await asyncio.to_thread(logging.getLogger("cluster.models").info, "from a thread")
        await task
        logging.getLogger("actors.registry").info("over")

    await asyncio.gather(handle("a"), handle("b"))
    logging.getLogger("ray.serve").info("Serve's own")
    assert sorted(kept.lines, key=str) == sorted(
        [(said, who) for who in ("a", "b") for said in ("begun", "from a thread", "from a task of its own")]
        + [("over", None), ("over", None), ("Serve's own", None)],
        key=str,
    )


def test_where_our_own_line_says_more_serves_is_held_back(kept: Kept) -> None:
    serve = logging.getLogger("ray.serve")
    join_serve(own_access_lines=True)
    with about("a"):
        serve.info("POST / 200 1.0ms", extra={"serve_access_log": True})
        serve.info("Serve's own")
    assert kept.lines == [("Serve's own", "a")]
