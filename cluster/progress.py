"""Progress of long work: a value that says how far it is, and a way for it to reach the person who waits.

Work that runs in Ray workers gets a `Sink` from `relayed`; what it puts in comes out in the driver.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Progress:
    """One report. `done` and `total` count `unit`s; `rate` is tokens (or `rate_unit`) per second."""

    stage: str
    done: float = 0
    total: float | None = None
    unit: str = "steps"
    rate: float | None = None
    rate_unit: str = "tokens/s"
    note: str = ""


Sink = Callable[[Progress], None]

_FETCH_PERIOD_S = 0.2


def silent(_: Progress) -> None:
    """The sink of work that nobody watches."""


class _Mailbox:
    """A Ray actor that keeps reports until they are fetched. Calls of one worker come in the order it made them."""

    def __init__(self) -> None:
        self._reports: list[Progress] = []

    def put(self, progress: Progress) -> None:
        self._reports.append(progress)

    def take(self) -> list[Progress]:
        taken, self._reports = self._reports, []
        return taken


class _RemoteSink:
    """Picklable; sends reports and never makes the work wait or fail."""

    def __init__(self, mailbox: Any) -> None:
        self._mailbox = mailbox

    def __call__(self, progress: Progress) -> None:
        self._mailbox.put.remote(progress)


@contextmanager
def relayed(sink: Sink) -> Iterator[Sink]:
    """A sink that Ray workers can hold. Reports reach `sink` in this process, in the order of each worker."""
    import ray  # heavy, and only needed once Ray runs
    from ray.exceptions import RayError

    mailbox = ray.remote(_Mailbox).options(num_cpus=0).remote()
    ended = threading.Event()

    def fetch() -> None:
        try:
            while True:
                ending = ended.wait(_FETCH_PERIOD_S)
                reports: list[Progress] = ray.get(mailbox.take.remote())
                for progress in reports:
                    sink(progress)
                # Reports may still be on their way when the work has ended: a round without any is the last.
                if ending and not reports:
                    return
                if ending:
                    time.sleep(_FETCH_PERIOD_S)
        except RayError:
            return  # the cluster is going; there is nobody left to hear from

    thread = threading.Thread(target=fetch, name="progress-relay", daemon=True)
    thread.start()
    try:
        yield _RemoteSink(mailbox)
    finally:
        ended.set()
        thread.join(timeout=5)
        ray.kill(mailbox)
