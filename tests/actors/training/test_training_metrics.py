"""Metrics reach the tracker in order, wait while it is away, and never disturb the run."""

import time

from actors.training.metrics import MetricLog
from cluster.errors import DependencyError
from cluster.tracking import MemoryTracker, Tracker


def tracker_with_run() -> tuple[MemoryTracker, str]:
    tracker = MemoryTracker()
    return tracker, tracker.begin_run("r", experiment="e", params={}, tags={})


def test_steps_are_written_in_order() -> None:
    tracker, run = tracker_with_run()
    log = MetricLog(lambda: tracker, run)
    for step in range(1, 6):
        log.log(step, {"loss": 1 / step})
    assert log.close() == 0
    assert tracker.history(run, "loss") == [(step, 1 / step) for step in range(1, 6)]


def test_what_was_logged_while_the_tracker_was_away_is_written_when_it_is_back() -> None:
    tracker, run = tracker_with_run()
    log = MetricLog(lambda: tracker, run, retry_s=0.02)
    log.log(1, {"loss": 3.0})
    while not tracker.history(run, "loss"):
        time.sleep(0.001)
    tracker.down = True
    log.log(2, {"loss": 2.0})
    time.sleep(0.05)
    tracker.down = False
    log.log(3, {"loss": 1.0})
    assert log.close() == 0
    assert tracker.history(run, "loss") == [(1, 3.0), (2, 2.0), (3, 1.0)]


def test_a_tracker_that_never_opens_costs_the_metrics_and_nothing_else() -> None:
    def refuse() -> Tracker:
        raise DependencyError("no tracker")

    log = MetricLog(refuse, "run", retry_s=0.02)
    log.log(1, {"loss": 3.0})
    log.log(2, {"loss": 2.0})
    assert log.close(timeout_s=1) == 2
