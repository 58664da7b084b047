"""Where each generation goes: Serve's replicas as a `Fleet`, and a policy's choice as Serve wants it.

Serve lets a deployment bring its own request router, in every process that holds a handle to it. Ours (`serve_router`)
asks the request itself: what it gets as its first argument is a `Placement`, which belongs to the gateway and knows the
load that the gateway has sent. So the router holds nothing, and the policy is `routing`'s, which knows no Ray.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ray.serve.request_router import RunningReplica

from deployments.gateway.fleet import Ask, Fleet, Replica
from deployments.gateway.routing import Affine, Choice, Policy

logger = logging.getLogger(__name__)


@dataclass
class Dispatcher:
    """The gateway's view of the replicas: what they reported, and what was sent to each since.

    Locked, because Serve's router may run in a thread of its own.
    """

    policy: Policy = field(default_factory=Affine)
    _fleet: Fleet = field(default_factory=lambda: Fleet.of(()))
    _reports: dict[str, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def choose(self, ask: Ask, reports: dict[str, dict[str, Any]]) -> Choice:
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

    def _hear(self, reports: dict[str, dict[str, Any]]) -> None:
        for gone in self._reports.keys() - reports.keys():
            self._fleet = self._fleet.without(gone)
            del self._reports[gone]
        for name, report in reports.items():
            # Serve gives the same object again until there is a new one: what was counted since is newer than that.
            if name not in self._reports or self._reports[name] is not report:
                self._reports[name] = report
                self._fleet = self._fleet.told(Replica(id=name, **report))


@dataclass(frozen=True)
class Placement:
    """What a request tells Serve's router: whom to try first. It never leaves the gateway's process."""

    dispatcher: Dispatcher
    ask: Ask

    def ranked(self, candidates: Sequence[RunningReplica]) -> list[list[RunningReplica]]:
        """The chosen one, and then, if it has died meanwhile, any other."""
        reports = {replica.replica_id.unique_id: replica.routing_stats for replica in candidates}
        choice = self.dispatcher.choose(self.ask, reports)
        logger.debug("%s goes to %s: %s", self.ask.adapter or "the base", choice.replica, choice.why)
        chosen = [replica for replica in candidates if replica.replica_id.unique_id == choice.replica]
        return [chosen, [replica for replica in candidates if replica not in chosen]]
