"""What a gateway knows of the LLM replicas at one moment: the snapshot that `routing` chooses from. Pure.

How it is used: one variable holds the current `Fleet`, and every event makes the next one.

    fleet = Fleet.of(replicas)                       the replicas are known, or their set has changed
    fleet = fleet.told(replica)                      a replica has reported: what it holds, how loaded it is
    choice = policy.choose(ask, fleet)
    fleet = fleet.sent(choice.replica, ask)          between two reports the gateway counts what it sends itself
    fleet = fleet.finished(choice.replica, ask)

Load is counted in tokens in flight, not in requests: one request of 4,000 tokens keeps an engine as busy as forty of
100. The indices (who holds an adapter, the sum of the load) follow the events, so that a choice only looks things up.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NOTHING: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, as far as its place matters."""

    adapter: str | None = None
    """The version's name in the engine (`protocol.Adapter.engine_name`), not an alias. Unset: the base answers."""
    prefix: str = ""
    """Text that the request begins with. An engine that has computed it before need not compute it again."""
    tokens: int = 1
    """Estimate: prompt and answer."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine, as it said or as the gateway counts on."""

    id: str
    slots: int = 1
    """Adapters that fit into it."""
    resident: Mapping[str, int] = field(default_factory=dict)
    """Adapters in it, each with its tokens in flight. One with 0 may be put out for another; the rest are pinned."""
    tokens_in_flight: int = 0
    """Of all its requests, also those without an adapter."""
    running: int = 0
    waiting: int = 0
    healthy: bool = True
    draining: bool = False

    @property
    def usable(self) -> bool:
        return self.healthy and not self.draining

    @property
    def pinned(self) -> int:
        return sum(tokens > 0 for tokens in self.resident.values())

    def can_take(self, adapter: str) -> bool:
        """It holds `adapter`, or has a slot that no running request needs. Looks at its own slots only."""
        return adapter in self.resident or self.pinned < self.slots


@dataclass(frozen=True, slots=True, eq=False)
class Fleet:
    """The replicas and the indices over those that may be chosen. Made by `of`, moved on by the other methods."""

    replicas: Mapping[str, Replica]
    usable: tuple[Replica, ...]
    """In the order of their ids, which is that of `seeds`; the indices are positions in it."""
    positions: Mapping[str, int]
    holders: Mapping[str, tuple[int, ...]]
    """Who holds an adapter, by its name."""
    seeds: NDArray[np.uint64]
    tokens_in_flight: int

    @classmethod
    def of(cls, replicas: Iterable[Replica]) -> "Fleet":
        """All indices anew: O(replicas × slots)."""
        known = {replica.id: replica for replica in replicas}
        usable = tuple(known[id] for id in sorted(known) if known[id].usable)
        holders: dict[str, tuple[int, ...]] = {}
        for position, replica in enumerate(usable):
            for adapter in replica.resident:
                holders[adapter] = (*holders.get(adapter, _NOTHING), position)
        return cls(
            replicas=known,
            usable=usable,
            positions={replica.id: position for position, replica in enumerate(usable)},
            holders=holders,
            seeds=np.array([name_digest(replica.id) for replica in usable], np.uint64),
            tokens_in_flight=sum(replica.tokens_in_flight for replica in usable),
        )

    def told(self, replica: Replica) -> "Fleet":
        """This replica is now so. A new one, or one that becomes usable or ceases to be, moves the positions."""
        position = self.positions.get(replica.id)
        if position is None or not replica.usable:
            return Fleet.of([*(other for id, other in self.replicas.items() if id != replica.id), replica])
        before = self.usable[position]
        return replace(
            self,
            replicas={**self.replicas, replica.id: replica},
            usable=(*self.usable[:position], replica, *self.usable[position + 1 :]),
            holders=self._holders_after(position, before.resident, replica.resident),
            tokens_in_flight=self.tokens_in_flight + replica.tokens_in_flight - before.tokens_in_flight,
        )

    def without(self, id: str) -> "Fleet":
        """The replica is gone."""
        return Fleet.of(replica for replica in self.replicas.values() if replica.id != id)

    def sent(self, id: str, ask: Ask) -> "Fleet":
        """A request was sent there. What it puts out for its adapter only the replica knows: `told` follows."""
        replica = self.replicas[id]
        return self.told(_moved(replica, ask.adapter, ask.tokens, 1))

    def finished(self, id: str, ask: Ask) -> "Fleet":
        """… and is over. A replica that has gone meanwhile needs no account."""
        replica = self.replicas.get(id)
        return self if replica is None else self.told(_moved(replica, ask.adapter, -ask.tokens, -1))

    def ranked(self, key: int) -> list[int]:
        """All positions, best first for `key`, by rendezvous hashing (Thaler and Ravishankar 1998).

        Every key has an order of its own: a replica that joins takes over only the keys that like it best, one that
        leaves gives away only its own, each to that key's next.
        """
        return [int(position) for position in np.argsort(_scores(self.seeds, key))[::-1]]

    def _holders_after(
        self, position: int, before: Mapping[str, int], after: Mapping[str, int]
    ) -> Mapping[str, tuple[int, ...]]:
        if before.keys() == after.keys():
            return self.holders
        holders = dict(self.holders)
        for adapter in before.keys() - after.keys():
            rest = tuple(other for other in holders[adapter] if other != position)
            if rest:
                holders[adapter] = rest
            else:
                del holders[adapter]
        for adapter in after.keys() - before.keys():
            holders[adapter] = (*holders.get(adapter, _NOTHING), position)
        return holders


def digest(text: str) -> int:
    """64 bits of `text`, the same on every gateway: Python's own hash differs from process to process."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


@lru_cache(maxsize=4096)
def name_digest(name: str) -> int:
    """`digest`, remembered: for names, which come again, and not for what clients write."""
    return digest(name)


def best(seeds: NDArray[np.uint64], key: int, among: list[int]) -> list[int]:
    """`among`, best first for `key`: the order of `Fleet.ranked`, for a few."""
    if len(among) < 2:
        return among
    scores = _scores(seeds[among], key)
    return [among[int(place)] for place in np.argsort(scores)[::-1]]


def _scores(seeds: NDArray[np.uint64], key: int) -> NDArray[Any]:
    # The finalizer of SplitMix64 (Steele, Lea and Flood 2014): a changed bit of the key or seed changes half of these.
    mixed = seeds ^ np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _moved(replica: Replica, adapter: str | None, tokens: int, requests: int) -> Replica:
    resident = replica.resident
    # Never below 0: a report that comes between `sent` and `finished` may know of the end already.
    if adapter is not None and (requests > 0 or adapter in resident):
        resident = {**resident, adapter: max(0, resident.get(adapter, 0) + tokens)}
    return replace(
        replica,
        resident=resident,
        tokens_in_flight=max(0, replica.tokens_in_flight + tokens),
        running=max(0, replica.running + requests),
    )
