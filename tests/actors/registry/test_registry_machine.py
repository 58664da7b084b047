"""The state machine against a model that is too simple to be wrong: a list of contents, a list of moves."""

from datetime import UTC, datetime
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from actors.registry.ledger import Ledger
from actors.registry.snapshot import resolve
from actors.registry.state import (
    AliasMove,
    Artifact,
    Promote,
    Register,
    Rollback,
    Version,
    VersionFact,
    replay,
    snapshot,
)
from actors.registry.store import Log, MemoryEventStore
from cluster.errors import RequestError, StateError

# Few of everything, so that commands meet: most of them on one alias of one name.
NAMES = st.sampled_from(["triage", "triage", "triage", "search"])
ALIASES = st.sampled_from(["champion", "champion", "champion", "canary"])
CONTENTS = st.sampled_from("abc")
NUMBERS = st.integers(0, 4)


class RegistryMachine(RuleBasedStateMachine):
    commands = Bundle("commands")

    def __init__(self) -> None:
        super().__init__()
        self.log = Log()
        self.ledger = Ledger(MemoryEventStore(self.log), clock=lambda: datetime(2026, 1, 1, tzinfo=UTC))
        self.contents: dict[str, list[str]] = {"triage": [], "search": []}
        self.stacks: dict[tuple[str, str], list[int]] = {}
        self.answers: dict[str, AliasMove] = {}
        self.sent = 0

    def _id(self) -> str:
        self.sent += 1
        return str(self.sent)

    @rule(name=NAMES, content=CONTENTS)
    def register(self, name: str, content: str) -> None:
        fact = VersionFact(name=name, kind="adapter", source_path=Path("/s"), base="b")
        answer = self.ledger.commit(Register(fact, Artifact(path=Path("/v") / content, digest=content)), by="m")
        known = self.contents[name]
        if content not in known:
            known.append(content)
        assert isinstance(answer, Version)
        assert answer.number == known.index(content) + 1

    @rule(
        target=commands,
        name=NAMES,
        alias=ALIASES,
        version=NUMBERS,
        expected=st.none() | st.none() | NUMBERS,
    )
    def promote(self, name: str, alias: str, version: int, expected: int | None):  # type: ignore[no-untyped-def]
        command = Promote(name, alias, version, "m", "why", self._id(), expected)
        stack = self.stacks.get((name, alias), [])
        current = stack[-1] if stack else 0
        try:
            answer = self.ledger.commit(command, by="m")
        except RequestError:
            assert not 1 <= version <= len(self.contents[name])
            return multiple()
        except StateError:
            assert expected not in (None, current)
            return multiple()
        assert isinstance(answer, AliasMove)
        assert answer.version == version
        assert expected in (None, current)
        if version == current:
            return multiple()
        self.stacks[name, alias] = [*stack, version]
        self.answers[command.command] = answer
        return command

    @rule(target=commands, name=NAMES, alias=ALIASES)
    def rollback(self, name: str, alias: str):  # type: ignore[no-untyped-def]
        command = Rollback(name, alias, "m", "why", self._id())
        stack = self.stacks.get((name, alias), [])
        try:
            answer = self.ledger.commit(command, by="m")
        except (StateError, RequestError):
            assert len(stack) < 2
            return multiple()
        self.stacks[name, alias] = stack[:-1]
        assert isinstance(answer, AliasMove)
        assert answer.version == stack[-2]
        self.answers[command.command] = answer
        return command

    @rule(command=commands)
    def the_same_command_again(self, command: Promote | Rollback) -> None:
        assert self.ledger.commit(command, by="m") == self.answers[command.command]

    @rule()
    def die_and_start_again(self) -> None:
        self.ledger = Ledger(MemoryEventStore(self.log), clock=lambda: datetime(2026, 1, 1, tzinfo=UTC))

    @invariant()
    def aliases_stand_where_the_model_says(self) -> None:
        expected = {f"{name}@{alias}": stack[-1] for (name, alias), stack in self.stacks.items() if stack}
        now = snapshot(self.ledger.state)
        assert dict(now.aliases) == expected
        for reference, number in expected.items():
            route = resolve(now, reference)
            assert route.digest == self.contents[route.name][number - 1]

    @invariant()
    def a_replay_of_the_log_is_the_live_state(self) -> None:
        assert replay(self.log.events) == self.ledger.state


RegistryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, database=None)
TestRegistryMachine = RegistryMachine.TestCase
