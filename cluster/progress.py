"""Progress of long work: a value that says how far it is, and a way for it to reach the person who waits.

Work that runs in Ray workers gets a `Sink` from `relayed`; what it puts in comes out in the driver.
"""

import threading
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


def silent(_: Progress) -> None:
    """The sink of work that nobody watches."""


class _RemoteSink:
    """Picklable; puts reports into a Ray queue and never makes the work wait or fail."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def __call__(self, progress: Progress) -> None:
        self._queue.actor.put.remote(progress)


@contextmanager
def relayed(sink: Sink) -> Iterator[Sink]:
    """A sink that Ray workers can hold. Reports reach `sink` in this process, in the order of each worker."""
    from ray.exceptions import RayError  # heavy, and only needed once Ray runs
    from ray.util.queue import Empty, Queue

    queue = Queue(actor_options={"num_cpus": 0})
    ended = threading.Event()

    def drain() -> None:
        while True:
            # Asked before the queue is: what was put in before the end is still taken out after it.
            last_round = ended.is_set()
            try:
                sink(queue.get(timeout=0.2))
            except Empty:
                if last_round:
                    return
            except RayError:
                return  # the cluster is going; there is nobody left to hear from

    thread = threading.Thread(target=drain, name="progress-relay", daemon=True)
    thread.start()
    try:
        yield _RemoteSink(queue)
    finally:
        ended.set()
        thread.join(timeout=5)
        queue.shutdown(force=True)
