"""Which replica answers a request. Pure: a policy sees an immutable `Fleet` and returns a value.

How it is used: see `fleet`; `choice.why` is one of few words, fit for a log line and a metric's label.

Three wishes pull apart: send an adapter where it lies (loading costs a request its patience and another adapter its
slot), send a prefix where it was computed, and leave no replica waiting while another is flooded. `Affine` follows the
first two within a bound on the third: consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018),
with loads in tokens. Nobody is chosen above `slack` × the mean, so that affinity costs at most that much imbalance.

A hot adapter gets copies as its load grows: one more is made once all its holders are above the bound. Its load also
says how many copies it needs; the others are left alone, and the engine's LRU puts them out when it needs the slot.
That is how copies shrink, without anybody deciding it.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from cluster.errors import CapacityError
from deployments.gateway.fleet import Ask, Fleet, Replica, best, digest, name_digest

NO_REPLICA_RETRY_AFTER_S = 5.0
"""A replica is started or comes back; the application decides how soon."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes, and why."""

    replica: str
    why: str
    """`resident` (it holds the adapter), `home` (nobody does; it is the adapter's stable place), `spread` (all holders
    are loaded: one more copy), `spill` (its home is loaded, or its slots are pinned), `prefix` or `idle` (the base),
    `crowded` (every engine's slots are pinned)."""
    looked: int
    """Replicas whose load was compared: what the choice cost."""


class Policy(Protocol):
    """A way to choose."""

    def choose(self, ask: Ask, fleet: Fleet) -> Choice:
        """A usable replica; `CapacityError` if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Affine:
    """Adapter and prefix affinity within a bound on the imbalance."""

    slack: float = 1.25
    """How far above the mean a replica may be and still be chosen. 1 is least-loaded, ∞ is pure affinity."""
    comfortable_tokens: int = 2048
    """Below this much in flight, and with nothing waiting, a replica is not loaded, whatever the mean: an engine that
    batches serves a few requests as fast as one, so that a quiet fleet has no reason to give up affinity."""
    prefix_characters: int = 512
    """How much of a prefix decides. More would tell apart conversations that share their system prompt."""

    def choose(self, ask: Ask, fleet: Fleet) -> Choice:
        if not fleet.usable:
            raise CapacityError("No replica of the language model is ready.", retry_after_s=NO_REPLICA_RETRY_AFTER_S)
        bound = _Bound(
            # With the request itself in the sum, as in the paper; the least loaded is never above it.
            tokens=self.slack * (fleet.tokens_in_flight + ask.tokens) / len(fleet.usable),
            comfortable=self.comfortable_tokens,
        )
        if ask.adapter is None:
            return self._for_base(ask, fleet, bound)
        return self._for_adapter(ask, ask.adapter, fleet, bound)

    def _for_base(self, ask: Ask, fleet: Fleet, bound: "_Bound") -> Choice:
        if ask.prefix:
            for looked, position in enumerate(fleet.ranked(self._prefix_key(ask)), 1):
                if bound.holds(fleet.usable[position]):
                    return Choice(fleet.usable[position].id, "prefix", looked)
        return Choice(min(fleet.usable, key=_load).id, "idle", len(fleet.usable))

    def _for_adapter(self, ask: Ask, adapter: str, fleet: Fleet, bound: "_Bound") -> Choice:
        holders = best(fleet.seeds, name_digest(adapter), list(fleet.holders.get(adapter, ())))
        looked = 0
        if holders:
            needed = self._copies(ask, adapter, holders, fleet, bound)
            # Within the copies that it needs a prefix has its place; the others only help out.
            by_prefix = best(fleet.seeds, self._prefix_key(ask), holders[:needed]) if ask.prefix else holders[:needed]
            for position in [*by_prefix, *holders[needed:]]:
                looked += 1
                if bound.holds(fleet.usable[position]):
                    return Choice(fleet.usable[position].id, "resident", looked)
        held = set(holders)
        order = [position for position in fleet.ranked(name_digest(adapter)) if position not in held]
        for place, position in enumerate(order):
            looked += 1
            replica = fleet.usable[position]
            if bound.holds(replica) and replica.can_take(adapter):
                return Choice(replica.id, "spread" if held else "spill" if place else "home", looked)
        # All below the bound have their slots pinned: wait where it lies, or else where most can be over soonest.
        waits = [fleet.usable[position] for position in holders] or fleet.usable
        return Choice(min(waits, key=_load).id, "crowded", looked + len(waits))

    def _copies(self, ask: Ask, adapter: str, holders: list[int], fleet: Fleet, bound: "_Bound") -> int:
        """How many replicas this adapter's load alone would fill to the bound."""
        tokens = ask.tokens + sum(fleet.usable[position].resident.get(adapter, 0) for position in holders)
        return min(len(holders), max(1, math.ceil(tokens / max(bound.tokens, bound.comfortable, 1))))

    def _prefix_key(self, ask: Ask) -> int:
        # The version is part of it, with its length so that it cannot run into the text: a prefix that was computed by
        # other weights is of no use.
        name = "-" if ask.adapter is None else f"{len(ask.adapter)}:{ask.adapter}"
        return digest(f"{name}{ask.prefix[: self.prefix_characters]}")


@dataclass(frozen=True, slots=True)
class _Bound:
    tokens: float
    comfortable: int

    def holds(self, replica: Replica) -> bool:
        if replica.tokens_in_flight <= self.tokens:
            return True
        return replica.waiting == 0 and replica.tokens_in_flight <= self.comfortable


def _load(replica: Replica) -> tuple[int, int]:
    return replica.tokens_in_flight, replica.waiting + replica.running
