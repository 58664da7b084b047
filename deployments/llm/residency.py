"""Which adapters an engine holds, who uses them, and which has to go for another: it decides, others act. Pure.

One who wants an adapter asks `lease` and does what the decision says; who was told to load says `loaded` or
`failed` at the end. It never decides to evict what is leased or pinned, and takes the least recently used of the
rest. Adapters that are never out of use would keep all others out for ever, so one who has waited too long may `claim`
a slot: it takes no new leases and is the claimant's when its last one ends. It knows no engine, no file and no clock.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

LOADS = 4
"""Adapters that come in at a time. An engine takes them between two steps, and each makes it stand for a moment."""
_FAULTS_KEPT = 32


@dataclass(frozen=True)
class Lease:
    """One use of one adapter: it stays until the lease is released."""

    name: str
    number: int


@dataclass(frozen=True)
class Resident:
    """It is there: use it."""

    lease: Lease


@dataclass(frozen=True)
class Loading:
    """Somebody else brings it in. The lease holds if that ends well; if it fails, there is no lease any more."""

    lease: Lease


@dataclass(frozen=True)
class Load:
    """Take `evict` out if it is named, bring this one in, and say `loaded` or `failed`."""

    lease: Lease
    evict: str | None


@dataclass(frozen=True)
class Wait:
    """Nothing can go now. Ask again after the next `release`, `loaded`, `failed`, `waive` or `pin`."""


@dataclass(frozen=True)
class Refused:
    """Every slot is taken by a pinned adapter, so waiting is of no use."""


Decision = Resident | Loading | Load | Wait | Refused


@dataclass(frozen=True)
class Fault:
    """Why an adapter could not be brought in the last time, for people to read: the next try is free."""

    why: str
    at: datetime


@dataclass
class _Slot:
    loaded: bool = False
    leases: set[Lease] = field(default_factory=set)
    heir: str | None = None
    """Who has claimed it."""


class Residency:
    """At most `limit` adapters are resident or loading; at most `loads` of them are loading at a time."""

    def __init__(self, limit: int, *, loads: int = LOADS) -> None:
        self._limit = limit
        self._loads = loads
        self._slots: OrderedDict[str, _Slot] = OrderedDict()
        """Least recently used first."""
        self._pinned: frozenset[str] = frozenset()
        self._faults: OrderedDict[str, Fault] = OrderedDict()
        self._number = 0

    @property
    def resident(self) -> tuple[str, ...]:
        """What is loaded, least recently used first."""
        return tuple(name for name, slot in self._slots.items() if slot.loaded)

    @property
    def pinned(self) -> frozenset[str]:
        """What is not evicted, resident or not."""
        return self._pinned

    @property
    def faults(self) -> Mapping[str, Fault]:
        """The last fault of each name that nobody has got since, oldest first."""
        return dict(self._faults)

    def leases(self, name: str) -> int:
        """How many use it now."""
        slot = self._slots.get(name)
        return len(slot.leases) if slot else 0

    def lease(self, name: str) -> Decision:
        """What one who wants `name` has to do now. All but `Wait` and `Refused` give a lease, to be released once."""
        slot = self._slots.get(name)
        if slot is not None and slot.heir is not None:
            return Wait()
        if slot is not None:
            lease = self._leased(name, slot)
            if not slot.loaded:
                return Loading(lease)
            self._faults.pop(name, None)
            return Resident(lease)
        full = len(self._slots) >= self._limit
        if full and self._pinned >= self._slots.keys():
            return Refused()
        if sum(not slot.loaded for slot in self._slots.values()) >= self._loads:
            return Wait()
        evict = self._evictable(name) if full else None
        if full and evict is None:
            return Wait()
        if evict is not None:
            del self._slots[evict]
        self.waive(name)
        slot = self._slots[name] = _Slot()
        return Load(self._leased(name, slot), evict)

    def claim(self, name: str) -> None:
        """One who was told to wait has waited too long: of the slots that can go, the one with the fewest leases is to
        be its own. Saying so again changes nothing while it has a claim; without such a slot it has none."""
        if name in self._slots or any(slot.heir == name for slot in self._slots.values()):
            return
        free = [
            slot
            for other, slot in self._slots.items()
            if slot.loaded and slot.heir is None and other not in self._pinned
        ]
        if free:
            min(free, key=lambda slot: len(slot.leases)).heir = name

    def waive(self, name: str) -> None:
        """Whoever claimed a slot for `name` does not wait any more; if others still do, they claim again."""
        for slot in self._slots.values():
            if slot.heir == name:
                slot.heir = None

    def release(self, lease: Lease) -> None:
        """This use has ended. Saying so twice, or after the load has failed, changes nothing."""
        slot = self._slots.get(lease.name)
        if slot is not None and lease in slot.leases:
            slot.leases.remove(lease)
            self._slots.move_to_end(lease.name)

    def loaded(self, name: str) -> None:
        """The load that `lease` has asked for has ended well."""
        self._slots[name].loaded = True
        self._faults.pop(name, None)

    def failed(self, name: str, why: str, at: datetime) -> None:
        """It could not be brought in. If it was loading, its slot is free, and all leases on it are void."""
        slot = self._slots.get(name)
        if slot is not None and not slot.loaded:
            del self._slots[name]
        self._faults[name] = Fault(why, at)
        self._faults.move_to_end(name)
        if len(self._faults) > _FAULTS_KEPT:
            self._faults.popitem(last=False)

    def pin(self, names: Iterable[str]) -> None:
        """From now on exactly these are not evicted. Bringing them in is the caller's, with a lease, as for all."""
        wanted = frozenset(names)
        if len(wanted) > self._limit:
            raise ValueError(f"{len(wanted)} adapters cannot be pinned in {self._limit} slots")
        self._pinned = wanted
        for name in wanted & self._slots.keys():
            self._slots[name].heir = None

    def _leased(self, name: str, slot: _Slot) -> Lease:
        self._number += 1
        lease = Lease(name, self._number)
        slot.leases.add(lease)
        self._slots.move_to_end(name)
        return lease

    def _evictable(self, wanted: str) -> str | None:
        free = [
            (name, slot.heir)
            for name, slot in self._slots.items()
            if slot.loaded and not slot.leases and name not in self._pinned and slot.heir in (None, wanted)
        ]
        own = (name for name, heir in free if heir == wanted)
        return next(own, None) or next((name for name, _ in free), None)
