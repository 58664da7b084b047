from datetime import UTC, datetime

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deployments.llm.residency import Lease, Load, Loading, Refused, Residency, Resident, Wait

NAMES = tuple("abcdefg")
LIMIT, LOADS = 3, 2
AT = datetime(2026, 1, 1, tzinfo=UTC)


def loaded(residency: Residency, name: str) -> Lease:
    decision = residency.lease(name)
    assert isinstance(decision, Load)
    residency.loaded(name)
    return decision.lease


def test_a_first_use_loads_and_a_second_is_there() -> None:
    residency = Residency(2)
    lease = loaded(residency, "a")
    assert isinstance(residency.lease("a"), Resident)
    assert (residency.resident, residency.leases("a")) == (("a",), 2)
    residency.release(lease)
    residency.release(lease)
    assert residency.leases("a") == 1


def test_the_least_recently_used_goes() -> None:
    residency = Residency(2)
    for name in "ab":
        residency.release(loaded(residency, name))
    again = residency.lease("a")
    assert isinstance(again, Resident)
    residency.release(again.lease)
    decision = residency.lease("c")
    assert isinstance(decision, Load)
    assert decision.evict == "b"


def test_whoever_comes_while_it_loads_shares_the_load() -> None:
    residency = Residency(1)
    first, second = residency.lease("a"), residency.lease("a")
    assert isinstance(first, Load)
    assert isinstance(second, Loading)
    residency.loaded("a")
    residency.release(first.lease)
    assert isinstance(residency.lease("b"), Wait)
    residency.release(second.lease)
    assert isinstance(residency.lease("b"), Load)


def test_nothing_in_use_is_evicted_and_pinned_ones_refuse_the_rest() -> None:
    residency = Residency(2)
    residency.pin("ab")
    residency.release(loaded(residency, "a"))
    used = loaded(residency, "c")
    assert isinstance(residency.lease("b"), Wait)
    residency.release(used)
    assert residency.lease("b") == Load(Lease("b", 3), evict="c")
    assert residency.lease("c") == Refused()
    residency.loaded("b")
    residency.pin("a")
    assert isinstance(residency.lease("c"), Wait)  # the lease on b that no longer is a pin


def test_a_failure_frees_the_slot_voids_the_leases_and_is_remembered_until_it_works() -> None:
    residency = Residency(1)
    lost = residency.lease("a")
    assert isinstance(lost, Load)
    residency.failed("a", "cut short", AT)
    assert residency.faults["a"].why == "cut short"
    again = residency.lease("a")
    assert isinstance(again, Load)
    residency.release(lost.lease)  # comes late: not a lease on the second try
    assert residency.leases("a") == 1
    residency.loaded("a")
    assert not residency.faults


def test_one_that_failed_while_it_was_there_stays_and_is_well_again_with_its_next_use() -> None:
    residency = Residency(1)
    loaded(residency, "a")
    residency.failed("a", "its files cannot be read", AT)
    assert residency.resident == ("a",)
    assert isinstance(residency.lease("a"), Resident)
    assert not residency.faults


def test_the_memory_of_failures_is_bounded() -> None:
    residency = Residency(1)
    for number in range(100):
        residency.failed(f"x/{number}", "gone", AT)
    assert len(residency.faults) == 32
    assert "x/99" in residency.faults


def test_one_who_has_waited_too_long_is_the_next_however_wanted_the_others_are() -> None:
    residency = Residency(2)
    first, second = loaded(residency, "a"), loaded(residency, "b")
    again = residency.lease("a")
    assert isinstance(again, Resident)
    assert isinstance(residency.lease("c"), Wait)
    residency.claim("c")
    assert isinstance(residency.lease("b"), Wait)  # fewer are on it than on the other
    assert isinstance(residency.lease("a"), Resident)
    residency.release(second)
    assert isinstance(residency.lease("b"), Wait)
    assert isinstance(residency.lease("d"), Wait)
    decision = residency.lease("c")
    assert isinstance(decision, Load)
    assert decision.evict == "b"
    residency.loaded("c")
    assert isinstance(residency.lease("c"), Resident)
    residency.release(first)


def test_a_claim_that_is_waived_or_pinned_away_leaves_the_slot_as_it_was() -> None:
    residency = Residency(1)
    loaded(residency, "a")
    residency.claim("b")
    residency.waive("b")
    assert isinstance(residency.lease("a"), Resident)
    residency.claim("b")
    residency.pin("a")
    residency.claim("c")
    assert isinstance(residency.lease("a"), Resident)


def test_no_more_pins_than_slots() -> None:
    with pytest.raises(ValueError, match="3 adapters cannot be pinned in 2 slots"):
        Residency(2).pin("abc")


class Machine(RuleBasedStateMachine):
    """Any order of uses, ends, loads, failures and pins, against a model of what must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.residency = Residency(LIMIT, loads=LOADS)
        self.engine: set[str] = set()
        self.loading: set[str] = set()
        self.leases: list[Lease] = []
        self.used: list[str] = []
        self.pins: set[str] = set()
        self.heirs: dict[str, str] = {}

    def _in_use(self) -> set[str]:
        return {lease.name for lease in self.leases}

    def _use(self, name: str) -> None:
        self.used = [other for other in self.used if other != name] + [name]

    @rule(name=st.sampled_from(NAMES))
    def lease(self, name: str) -> None:
        free = [n for n in self.used if n in self.engine and n not in self._in_use() | self.pins]
        own = [n for n in free if self.heirs.get(n) == name]
        evictable = own or [n for n in free if n not in self.heirs]
        taken = self.engine | self.loading
        decision = self.residency.lease(name)
        if name in self.heirs:
            assert isinstance(decision, Wait)
        elif name in taken:
            assert isinstance(decision, Resident if name in self.engine else Loading)
        elif len(taken) == LIMIT and taken <= self.pins:
            assert isinstance(decision, Refused)
        elif len(self.loading) == LOADS or (len(taken) == LIMIT and not evictable):
            assert isinstance(decision, Wait)
        else:
            assert isinstance(decision, Load)
            assert decision.evict == (evictable[0] if len(taken) == LIMIT else None)
            self.engine.discard(decision.evict or "")
            self.loading.add(name)
            self.heirs = {n: heir for n, heir in self.heirs.items() if heir != name and n != decision.evict}
        if isinstance(decision, Resident | Loading | Load):
            self.leases.append(decision.lease)
            self._use(name)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        self.residency.release(lease)
        self._use(lease.name)

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), well=st.booleans())
    def end_load(self, data: st.DataObject, well: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.loading)))
        self.loading.remove(name)
        if well:
            self.residency.loaded(name)
            self.engine.add(name)
        else:
            self.residency.failed(name, "broken", AT)
            self.leases = [lease for lease in self.leases if lease.name != name]

    @rule(names=st.sets(st.sampled_from(NAMES), max_size=LIMIT))
    def pin(self, names: set[str]) -> None:
        self.residency.pin(names)
        self.pins = names
        self.heirs = {n: heir for n, heir in self.heirs.items() if n not in names}

    @rule(name=st.sampled_from(NAMES))
    def claim(self, name: str) -> None:
        self.residency.claim(name)
        claimable = [n for n in self.used if n in self.engine and n not in self.pins | self.heirs.keys()]
        if claimable and name not in self.engine | self.loading | set(self.heirs.values()):
            self.heirs[min(claimable, key=self.residency.leases)] = name

    @rule(name=st.sampled_from(NAMES))
    def waive(self, name: str) -> None:
        self.residency.waive(name)
        self.heirs = {n: heir for n, heir in self.heirs.items() if heir != name}

    @invariant()
    def it_knows_what_the_engine_holds(self) -> None:
        assert set(self.residency.resident) == self.engine
        assert len(self.engine) + len(self.loading) <= LIMIT
        assert all(self.residency.leases(n) == sum(lease.name == n for lease in self.leases) for n in NAMES)


TestAnyOrder = Machine.TestCase
