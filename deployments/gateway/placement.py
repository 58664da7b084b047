"""Where each generation goes: Serve's replicas as a `Fleet`, and a policy's choice as Serve wants it.

Serve lets a deployment bring its own request router, in every process that has a handle to it. Ours (`serve_router`)
asks the request itself: what it gets as its first argument is a `Placement`, which belongs to the gateway and knows the
load that the gateway has sent. So the router holds nothing, and the policy is `routing`'s, which knows no Ray.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from ray.serve.request_router import RunningReplica

from deployments.gateway.fleet import Ask, Fleet, Replica
from deployments.gateway.routing import Affine, Choice, Policy
from deployments.llm.protocol import Build

SILENT_S = 6.0
"""Reports come each second. Who is this much behind the others hangs, or is cut off."""
_BEAT = "beat"
"""In a report: its number. Serve hands over all reports anew when one of them is new."""

logger = logging.getLogger(__name__)


@dataclass
class Dispatcher:
    """The gateway's view of the replicas: what they reported, and what was sent to each since.

    Locked, because Serve's router may run in a thread of its own.
    """

    policy: Policy = field(default_factory=Affine)
    build: Build | None = None
    """What the gateway was deployed with. Set: replicas that serve another model are none of ours."""
    clock: Callable[[], float] = time.monotonic
    _fleet: Fleet = field(default_factory=lambda: Fleet.of(()))
    _reports: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    _heard_at: dict[str, float] = field(default_factory=dict)
    _doubted: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def live(self) -> int:
        """How many replicas could take a request, when the last one was sent."""
        return len(self._fleet.usable)

    def choose(self, ask: Ask, reports: Mapping[str, Mapping[str, Any]]) -> Choice:
        """Among the replicas that have reported so (`LLMDeployment.record_routing_stats`), by Serve's id."""
        with self._lock:
            self._hear(reports)
            return self.policy.choose(ask, self._fleet)

    @contextmanager
    def sent(self, replica: str, ask: Ask) -> Iterator[None]:
        """`ask` is in that replica's hands for as long as the block runs."""
        with self._lock:
            if replica in self._fleet.replicas:
                self._fleet = self._fleet.sent(replica, ask)
        try:
            yield
        finally:
            with self._lock:
                self._fleet = self._fleet.finished(replica, ask)

    def doubt(self, replica: str) -> None:
        """It did not answer. Others are preferred until it reports again."""
        with self._lock:
            if replica in self._fleet.replicas:
                logger.warning("Replica %s does not answer; it is passed by until it reports again.", replica)
                self._doubted.add(replica)
                self._judge()

    def ours(self, builds: Mapping[str, Build | None]) -> set[str]:
        """Which of these replicas may answer this gateway's requests.

        In the middle of an update both the old and the new are there. A gateway asks those that it was deployed with,
        and else those of the same model: an answer of other weights under this name would be wrong.
        """
        if self.build is None:
            return set(builds)
        same = {name for name, build in builds.items() if build == self.build}
        return same or {name for name, build in builds.items() if build and build.model == self.build.model}

    def _hear(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        for gone in self._reports.keys() - reports.keys():
            self._fleet = self._fleet.without(gone)
            self._doubted.discard(gone)
            del self._reports[gone], self._heard_at[gone]
        for name, report in reports.items():
            # What was counted since an old report is newer than that report.
            if name not in self._reports or _is_news(report, self._reports[name]):
                self._reports[name], self._heard_at[name] = report, self.clock()
                self._doubted.discard(name)
                facts = {key: value for key, value in report.items() if key != _BEAT}
                self._fleet = self._fleet.told(Replica(id=name, **facts))
        self._judge()

    def _judge(self) -> None:
        """Who hangs is passed by, unless all do: then it is rather the news that do not come."""
        if not self._heard_at:
            return
        newest = max(self._heard_at.values())
        hanging = {name for name, at in self._heard_at.items() if newest - at > SILENT_S} | self._doubted
        if hanging >= self._heard_at.keys():
            hanging = set()
        for name, replica in self._fleet.replicas.items():
            if replica.healthy == (name in hanging):
                self._fleet = self._fleet.told(replace(replica, healthy=name not in hanging))


def _is_news(report: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    return report is not known and (_BEAT not in report or report[_BEAT] != known.get(_BEAT))


@runtime_checkable
class Router(Protocol):
    """What a call may carry as its first argument, for `serve_router` to ask."""

    def ranked(self, candidates: Sequence[RunningReplica]) -> list[list[RunningReplica]]:
        """Whom to try first, and whom then; an empty list inside: nobody now."""
        ...


@dataclass
class RollCall:
    """Looks who is there. The call that carries it goes anywhere."""

    dispatcher: Dispatcher
    ours: bool = False
    """There is one of the gateway's own settings."""
    others: bool = False
    """There is one of other settings."""

    def ranked(self, candidates: Sequence[RunningReplica]) -> list[list[RunningReplica]]:
        builds = {Build.published(one.replica_metadata) for one in candidates}
        self.ours, self.others = self.dispatcher.build in builds, bool(builds - {self.dispatcher.build})
        return [list(candidates)]


@dataclass(frozen=True)
class Placement:
    """What a request tells Serve's router: whom to try first. It never leaves the gateway's process."""

    dispatcher: Dispatcher
    ask: Ask
    wait_s: float = 0.0
    """How long it is asked for. Serve goes on looking after that, for nobody: then any replica ends it."""
    tried: list[str] = field(default_factory=list)
    """Whom it was sent to, the last one at the end."""
    made: float = field(default_factory=time.monotonic)
    _counted: ExitStack = field(default_factory=ExitStack)
    _over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """While the block runs, whoever was chosen counts as having the request.

        Serve asks the chosen replica whether it has room before it hands it over; of a crowd that comes at once, all
        would be sent to the same one in that time.
        """
        try:
            yield
        finally:
            with self._lock:
                self._over.set()  # Serve may go on looking, for nobody
                self._counted.close()

    def ranked(self, candidates: Sequence[RunningReplica]) -> list[list[RunningReplica]]:
        """The chosen one, and then, if it has died meanwhile, any other."""
        builds = {one.replica_id.unique_id: Build.published(one.replica_metadata) for one in candidates}
        ours = self.dispatcher.ours(builds)
        if not ours:
            return [[] if time.monotonic() - self.made < self.wait_s else list(candidates)]
        candidates = [one for one in candidates if one.replica_id.unique_id in ours]
        reports = {one.replica_id.unique_id: one.routing_stats for one in candidates}
        with self._lock:
            self._counted.close()  # the choice before this one has come to nothing
            choice = self.dispatcher.choose(self.ask, reports)
            if not self._over.is_set():
                self._counted.enter_context(self.dispatcher.sent(choice.replica, self.ask))
        self.tried.append(choice.replica)
        logger.debug("%s goes to %s: %s", self.ask.adapter or "the base", choice.replica, choice.why)
        chosen = [one for one in candidates if one.replica_id.unique_id == choice.replica]
        return [chosen, [one for one in candidates if one not in chosen]]
