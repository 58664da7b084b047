"""Progress of long work: a value that says how far it is, and a way for it to reach the person who waits.

Work that runs in Ray workers gets a `Sink` from `relayed`; what it puts in comes out in the driver.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


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
_PATIENCE_S = 30.0
"""How long anybody waits for a mailbox that does not answer. The first report may have to wait until it is up."""


def silent(_: Progress) -> None:
    """The sink of work that nobody watches."""


class Carried(ABC):
    """A sink that can be pickled and is called where the work is done: `relayed` hands it on as it is."""

    @abstractmethod
    def __call__(self, progress: Progress) -> None: ...


class _Mailbox:
    """A Ray actor that keeps reports until they are fetched."""

    def __init__(self) -> None:
        self._reports: list[Progress] = []

    def put(self, progress: Progress) -> None:
        self._reports.append(progress)

    def take(self) -> list[Progress]:
        taken, self._reports = self._reports, []
        return taken


class _RemoteSink:
    """Picklable; a report lies in the mailbox when the call returns. Never makes the work fail.

    That costs the work one round trip (about a millisecond), and it is what makes the end of a relay certain: Ray
    promises no order between a worker's answer and calls that it left behind, and drops those of one that has died.
    """

    def __init__(self, mailbox: Any) -> None:
        self._mailbox = mailbox
        self._answers = True

    def __call__(self, progress: Progress) -> None:
        import ray
        from ray.exceptions import RayError

        try:
            sent = self._mailbox.put.remote(progress)
            if self._answers:
                ray.get(sent, timeout=_PATIENCE_S)
        except RayError as error:
            # The work waits only once: from now on reports are sent and not waited for.
            if self._answers:
                logger.warning("progress is not heard of any more: %s", type(error).__name__)
            self._answers = False


@contextmanager
def relayed(sink: Sink) -> Iterator[Sink]:
    """A sink that Ray workers can hold. Reports reach `sink` in this process, in the order of each worker.

    Every report whose call has returned before the block ends has reached `sink` when it has ended, whether its
    worker lives or not. That does not hold for a mailbox that dies or hangs, with its node or the cluster: then
    reports are lost, and a worker, or the end of the block, waits for at most `_PATIENCE_S`.
    """
    if isinstance(sink, Carried):
        yield sink
        return
    import ray  # heavy, and only needed once Ray runs
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Here, and not on whichever node is free: that one may be lost while this process, and the work, go on.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    mailbox = ray.remote(_Mailbox).options(num_cpus=0, scheduling_strategy=here).remote()
    ended = threading.Event()

    def fetch() -> None:
        # The cluster may go, or the mailbox: then there is nobody left to hear from.
        with suppress(RayError):
            ending = False
            while not ending:
                # Taken after the end, so after all that was put before it.
                ending = ended.wait(_FETCH_PERIOD_S)
                reports: list[Progress] = ray.get(mailbox.take.remote())
                for progress in reports:
                    try:
                        sink(progress)
                    except Exception:  # else this thread would end, and no later report would be seen by anybody
                        logger.exception("a progress report could not be shown")

    thread = threading.Thread(target=fetch, name="progress-relay", daemon=True)
    thread.start()
    try:
        yield _RemoteSink(mailbox)
    finally:
        ended.set()
        thread.join(timeout=_PATIENCE_S)
        if thread.is_alive():
            logger.warning("the last progress reports are lost: their mailbox does not answer")
        with suppress(RayError):  # it may be gone, and the cluster with it
            ray.kill(mailbox)
