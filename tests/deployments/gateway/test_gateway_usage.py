from datetime import UTC, datetime, timedelta

from actors.registry.serving import Traffic
from deployments.gateway.usage import Usage

NINE = datetime(2026, 1, 1, 9, tzinfo=UTC)


class Clock:
    def __init__(self) -> None:
        self.now = NINE + timedelta(minutes=20)

    def __call__(self) -> datetime:
        return self.now


def test_totals_by_version_and_hour() -> None:
    clock = Clock()
    usage = Usage(clock=clock)
    usage.answered("triage/1", failed=False)
    usage.tokens("triage/1", prompt=7, completion=3)
    usage.answered("triage/1", failed=True)
    clock.now += timedelta(hours=1)
    usage.answered("triage/2", failed=False)
    assert usage.changed() == (
        Traffic(version_id="triage/1", hour=NINE, requests=2, failures=1, prompt_tokens=7, completion_tokens=3),
        Traffic(version_id="triage/2", hour=NINE + timedelta(hours=1), requests=1),
    )


def test_only_what_changed_since_the_last_report_is_reported_again_and_as_totals() -> None:
    usage = Usage(clock=Clock())
    usage.answered("triage/1", failed=False)
    usage.answered("triage/2", failed=False)
    sent = usage.changed()
    usage.answered("triage/1", failed=False)  # while the report is on its way
    usage.reported(sent)
    assert usage.changed() == (Traffic(version_id="triage/1", hour=NINE, requests=2),)
    usage.reported(usage.changed())
    assert usage.changed() == ()
    usage.answered("triage/2", failed=False)
    assert usage.changed() == (Traffic(version_id="triage/2", hour=NINE, requests=2),)


def test_a_lost_report_is_in_the_next_and_past_hours_do_not_pile_up() -> None:
    clock = Clock()
    usage = Usage(clock=clock)
    for _ in range(100):
        usage.answered("triage/1", failed=False)
        clock.now += timedelta(hours=1)
    assert len(usage.changed()) == 100
    usage.reported(usage.changed())
    assert usage.changed() == ()
    assert not usage._counts
