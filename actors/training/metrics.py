"""Metrics of a run on their way to the tracker: written as they happen, kept while it is away, never in the way.

A thread writes; the loop only appends. This module knows the `Tracker` port, not MLflow.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping

from cluster.errors import DependencyError
from cluster.tracking import Tracker

logger = logging.getLogger(__name__)


class MetricLog:
    """Steps in the order they were logged; at most the newest `capacity` are kept while the tracker is away."""

    def __init__(
        self, open_tracker: Callable[[], Tracker], run: str, *, retry_s: float = 10.0, capacity: int = 100_000
    ) -> None:
        self._open = open_tracker
        self._run = run
        self._retry_s = retry_s
        self._waiting: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=capacity)
        self._tracker: Tracker | None = None
        self._wake = threading.Condition()
        self._closing = False
        self._away = False
        # Opening MLflow imports it and checks its tables (seconds); the first steps need not wait for that.
        self._thread = threading.Thread(target=self._write_until_closed, name="metric-log", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the values of one step; never waits and never fails."""
        with self._wake:
            self._waiting.append((step, dict(metrics)))
            self._wake.notify()

    def close(self, *, timeout_s: float = 30.0) -> int:
        """Write what waits, once more, and return how many steps could not be written."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        left = len(self._waiting)
        if left:
            logger.warning("%d steps of metrics could not be written to the tracker; the run itself is whole", left)
        return left

    def _write_until_closed(self) -> None:
        last = False
        while not last:
            with self._wake:
                self._wake.wait_for(self._has_work, timeout=self._retry_s)
                last = self._closing
            try:
                written = self._write()
            except DependencyError as error:
                if not self._away:
                    logger.warning("metrics wait, training goes on: %s", error)
                self._away = True
            else:
                if self._away:
                    logger.info("the tracker is back: %d steps of metrics written late", written)
                self._away = False

    def _has_work(self) -> bool:
        # While the tracker is away, new steps are no reason to try again at once; the timeout is.
        return self._closing or (bool(self._waiting) and not self._away)

    def _write(self) -> int:
        """Write all that waits. A step leaves the queue only when the tracker has it."""
        written = 0
        while self._waiting:
            if self._tracker is None:
                self._tracker = self._open()
            step, values = self._waiting[0]
            self._tracker.log_metrics(self._run, values, step=step)
            self._waiting.popleft()
            written += 1
        return written
