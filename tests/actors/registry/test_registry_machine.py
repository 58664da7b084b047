"""The state machine against a model that is too simple to be wrong: contents, stages, moves and pins in plain lists."""

from datetime import UTC, datetime
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from actors.registry.facts import AliasMove, Artifact, Collected, GateBegun, GateEnded, Version, VersionFact
from actors.registry.ledger import Ledger
from actors.registry.rules import BeginGate, Pin, Promote, Register, Retire, Rollback
from actors.registry.snapshot import Split, resolve
from actors.registry.state import held, replay, snapshot
from actors.registry.store import Log, MemoryEventStore
from cluster.errors import RequestError, StateError

# Few of everything, so that commands meet: most of them on one alias of one name.
NAMES = st.sampled_from(["triage", "triage", "triage", "search"])
ALIASES = st.sampled_from(["champion", "champion", "champion", "canary"])
CONTENTS = st.sampled_from("abc")
NUMBERS = st.integers(0, 4)
SPLITS = NUMBERS.map(lambda n: {n: 1.0}) | st.sets(st.integers(1, 3), min_size=2, max_size=2).map(
    lambda pair: dict.fromkeys(sorted(pair), 0.5)
)
NOW = datetime(2026, 1, 1, tzinfo=UTC)


class RegistryMachine(RuleBasedStateMachine):
    commands = Bundle("commands")

    def __init__(self) -> None:
        super().__init__()
        self.log = Log()
        self.ledger = Ledger(MemoryEventStore(self.log), clock=lambda: NOW)
        self.contents: dict[str, list[str]] = {"triage": [], "search": []}
        self.stages: dict[str, str] = {}
        self.passed: set[str] = set()
        self.freed: set[str] = set()
        self.pinned: set[str] = set()
        self.stacks: dict[tuple[str, str], list[Split]] = {}
        self.answers: dict[str, AliasMove] = {}
        self.sent = 0

    def _id(self) -> str:
        self.sent += 1
        return str(self.sent)

    def _fit(self, name: str, split: Split) -> bool:
        ids = {f"{name}/{number}" for number in split}
        return not ids & self.freed and all(self.stages[id_] != "retired" for id_ in ids)

    @rule(name=NAMES, content=CONTENTS)
    def register(self, name: str, content: str) -> None:
        fact = VersionFact(name=name, kind="adapter", source_path=Path("/s"), base="b")
        answer = self.ledger.commit(Register(fact, Artifact(path=Path(content), digest=content)), by="m")
        known = self.contents[name]
        if content not in known:
            known.append(content)
            self.stages[f"{name}/{len(known)}"] = "candidate"
        assert isinstance(answer, Version)
        assert answer.number == known.index(content) + 1
        self.freed.discard(answer.id)

    @rule(name=NAMES, number=NUMBERS, outcome=st.sampled_from(["passed", "passed", "blocked", "abandoned"]))
    def gate(self, name: str, number: int, outcome: str) -> None:
        id_ = f"{name}/{number}"
        stage = self.stages.get(id_)
        try:
            begun = self.ledger.commit(BeginGate(id_, "m", self._id()), by="m")
        except RequestError:
            assert stage is None
            return
        except StateError:
            assert stage in ("promoted", "retired")
            return
        assert stage in ("candidate", "passed", "blocked")
        assert isinstance(begun, GateBegun)
        assert self.ledger.state.stages[id_] == "evaluating"
        self.ledger.commit(GateEnded(gate_id=begun.id, outcome=outcome), by="m")  # type: ignore[arg-type]
        if outcome != "abandoned":
            self.stages[id_] = outcome
            (self.passed.add if outcome == "passed" else self.passed.discard)(id_)

    @rule(
        target=commands,
        name=NAMES,
        alias=ALIASES,
        split=SPLITS,
        expected=st.none() | st.none() | SPLITS,
        force=st.booleans(),
    )
    def promote(self, name: str, alias: str, split: Split, expected: Split | None, force: bool):  # type: ignore[no-untyped-def]
        if expected == {0: 1.0}:
            expected = {}
        command = Promote(name, alias, split, "m", "why", self._id(), expected, force)
        stack = self.stacks.get((name, alias), [])
        current = stack[-1] if stack else {}
        known = all(1 <= number <= len(self.contents[name]) for number in split)
        gated = {f"{name}/{number}" for number in split} <= self.passed
        try:
            answer = self.ledger.commit(command, by="m")
        except RequestError:
            assert not known
            return multiple()
        except StateError:
            assert expected not in (None, current) or not self._fit(name, split) or not (gated or force)
            return multiple()
        assert isinstance(answer, AliasMove)
        assert answer.split == split
        assert expected in (None, current)
        if split == current:
            return multiple()
        assert self._fit(name, split)
        assert force or gated
        assert answer.forced == (not gated)
        self._moved(name, alias, [*stack, split], command.command, answer)
        return command

    @rule(target=commands, name=NAMES, alias=ALIASES)
    def rollback(self, name: str, alias: str):  # type: ignore[no-untyped-def]
        command = Rollback(name, alias, "m", "why", self._id())
        stack = self.stacks.get((name, alias), [])
        fit = [place for place, split in enumerate(stack[:-1]) if split != stack[-1] and self._fit(name, split)]
        try:
            answer = self.ledger.commit(command, by="m")
        except (StateError, RequestError):
            assert not fit
            return multiple()
        assert isinstance(answer, AliasMove)
        assert answer.split == stack[fit[-1]]
        self._moved(name, alias, stack[: fit[-1] + 1], command.command, answer)
        return command

    def _moved(self, name: str, alias: str, stack: list[Split], command: str, answer: AliasMove) -> None:
        self.stacks[name, alias] = stack
        self.answers[command] = answer
        self.stages |= {f"{name}/{number}": "promoted" for number in stack[-1]}

    @rule(name=NAMES, number=NUMBERS)
    def retire(self, name: str, number: int) -> None:
        id_ = f"{name}/{number}"
        stands = any(number in stack[-1] for (owner, _), stack in self.stacks.items() if owner == name)
        try:
            self.ledger.commit(Retire(id_, "m", "why", self._id()), by="m")
        except RequestError:
            assert id_ not in self.stages
        except StateError:
            assert stands
        else:
            assert not stands
            self.stages[id_] = "retired"

    @rule(name=NAMES, number=st.integers(1, 3), pinned=st.booleans())
    def pin(self, name: str, number: int, pinned: bool) -> None:
        id_ = f"{name}/{number}"
        if id_ in self.stages and id_ not in self.freed:
            self.ledger.commit(Pin(id_, pinned, "m", "why"), by="m")
            (self.pinned.add if pinned else self.pinned.discard)(id_)

    @rule(name=NAMES, number=st.integers(1, 3))
    def collect(self, name: str, number: int) -> None:
        id_ = f"{name}/{number}"
        if id_ not in self.stages:
            return
        stacks = [stack for (owner, _), stack in self.stacks.items() if owner == name]
        reached = any(
            number in split and (place == len(stack) - 1 or self.stages[id_] != "retired")
            for stack in stacks
            for place, split in enumerate(stack)
        )
        try:
            self.ledger.commit(Collected(version_ids=(id_,)), by="m")
        except StateError:
            assert reached or id_ in self.pinned
        else:
            assert not reached
            assert id_ not in self.pinned
            self.freed.add(id_)

    @rule(command=commands)
    def the_same_command_again(self, command: Promote | Rollback) -> None:
        assert self.ledger.commit(command, by="m") == self.answers[command.command]

    @rule()
    def die_and_start_again(self) -> None:
        self.ledger = Ledger(MemoryEventStore(self.log), clock=lambda: NOW)

    @invariant()
    def aliases_stand_where_the_model_says_and_lead_to_files(self) -> None:
        now = snapshot(self.ledger.state)
        for (name, alias), stack in self.stacks.items():
            assert now.models[name].aliases[alias] == stack[-1]
            route = resolve(now, f"{name}@{alias}", key="somebody")
            assert route.digest == self.contents[name][route.version - 1]
            assert route.id not in self.freed

    @invariant()
    def stages_are_the_models_and_nothing_held_is_freed(self) -> None:
        assert self.ledger.state.stages == self.stages
        assert not held(self.ledger.state).keys() & self.freed

    @invariant()
    def a_replay_of_the_log_is_the_live_state(self) -> None:
        assert replay(self.log.events) == self.ledger.state


RegistryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, database=None)
TestRegistryMachine = RegistryMachine.TestCase
