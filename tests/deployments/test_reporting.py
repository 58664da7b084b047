import asyncio
import time

from actors.registry.serving import ServingReport
from cluster.errors import DependencyError
from deployments.reporting import Reporter


class Registry:
    def __init__(self) -> None:
        self.away = False
        self.reports: list[ServingReport] = []

    async def report(self, report: ServingReport) -> None:
        if self.away:
            raise DependencyError("The registry is away.")
        self.reports.append(report)


async def test_it_reports_at_once_when_asked_keeps_what_was_not_taken_and_says_the_last_on_stopping() -> None:
    registry, done = Registry(), []
    versions: list[str] = []
    reporter = Reporter(
        lambda: ServingReport(source="llm#a", node="n", holds=tuple(versions)),
        done.append,
        send=registry.report,
        rest_s=0,
    )
    reporter.start()
    registry.away = True
    versions.append("triage/1")
    reporter.soon()
    await asyncio.sleep(0.02)
    assert (registry.reports, done) == ([], [])
    registry.away = False
    reporter.soon()
    await asyncio.sleep(0.02)
    assert [report.holds for report in registry.reports] == [("triage/1",)]
    assert done == registry.reports
    versions.clear()
    await reporter.stop()
    assert registry.reports[-1].holds == ()


async def test_who_has_nothing_to_say_says_nothing() -> None:
    registry = Registry()
    reporter = Reporter(lambda: None, send=registry.report, every_s=0.005)
    reporter.start()
    await asyncio.sleep(0.03)
    await reporter.stop()
    assert registry.reports == []


async def test_news_without_end_are_not_reports_without_end() -> None:
    registry = Registry()
    reporter = Reporter(lambda: ServingReport(source="llm#a", node="n", holds=()), send=registry.report, rest_s=0.05)
    began = time.monotonic()
    reporter.start()
    for _ in range(50):
        reporter.soon()
        await asyncio.sleep(0.002)
    await reporter.stop()
    # One at once, one in each rest of however long it took here, and the last.
    assert 2 <= len(registry.reports) <= 2 + (time.monotonic() - began) / 0.05
