"""The registry's facts and rules, as a pure state machine over an append-only log.

`decide` says what a command adds to the log, or refuses it; `apply` folds one event into the state; `replay` folds
a whole log. Nothing here knows Ray, SQL, MLflow, files or clocks: the moment is an argument, and an artifact has
been stored before its `Register` arrives.

Every command may arrive twice, because a caller whose answer was lost asks again. The second time adds nothing and
gets the first answer:

    facts (data, run, checkpoint, evaluation)   the same fact under the same id is known already
    Register                                    the same content under the same name is the same version
    Promote, Rollback                           carry the caller's command id, which the move keeps
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeVar

from pydantic import ConfigDict, Field

from actors.registry.config import NAME_PATTERN, RESERVED_ALIAS
from actors.registry.snapshot import Kind, Route, Snapshot
from cluster.config import Config
from cluster.errors import RequestError, StateError

RunStatus = Literal["running", "completed", "failed", "stopped"]


class Fact(Config):
    """Something that happened. `event` names it in the log."""

    # A loss can be NaN; as JSON's null it could not be read back.
    model_config = ConfigDict(ser_json_inf_nan="strings")
    event: ClassVar[str]


class DataFact(Fact):
    """A data version exists. `rows` counts each split; `parent` is the version it was made from."""

    event: ClassVar[str] = "data"
    id: str
    name: str
    digest: str
    stage: Literal["examples", "tokens"]
    parent: str | None = None
    rows: dict[str, int] = Field(default_factory=dict)


class Driver(Config):
    """The process that drives a run, as Ray knows it: enough to tell later whether it still lives."""

    job_id: str
    node_id: str
    pid: int


class RunFact(Fact):
    """A training run began (or was taken up again by another driver)."""

    event: ClassVar[str] = "run"
    id: str
    name: str
    base: str
    base_digest: str
    data_version: str | None = None
    recipe: dict[str, Any] = Field(default_factory=dict)
    recipe_digest: str = ""
    code_commit: str = ""
    tracking_run: str | None = None
    driver: Driver | None = None


class CheckpointFact(Fact):
    """A run committed a checkpoint. `id` is `run/step-N`."""

    event: ClassVar[str] = "checkpoint"
    id: str
    run_id: str
    step: int = Field(ge=0)
    path: Path
    metrics: dict[str, float] = Field(default_factory=dict)


class RunEnded(Fact):
    """A run is over. `verdict` is one line for a person; `presumed`: concluded by the registry, not said by the run."""

    event: ClassVar[str] = "run-ended"
    run_id: str
    status: Literal["completed", "failed", "stopped"]
    verdict: str = ""
    presumed: bool = False


class EvaluationFact(Fact):
    """A candidate was measured. `passed` is the gate's verdict, `report` the whole report."""

    event: ClassVar[str] = "evaluation"
    id: str
    run_id: str | None = None
    checkpoint_id: str | None = None
    data_version: str | None = None
    report: dict[str, Any] = Field(default_factory=dict)
    passed: bool


class VersionFact(Config):
    """What a caller asks to register: the folder at `source_path`, and where it comes from.

    Ids that are given must be known to the registry. `base` names the model an adapter belongs to, or the model
    that a full model or embedder was trained from.
    """

    name: str
    kind: Kind
    source_path: Path
    base: str
    base_digest: str = ""
    tokenizer_digest: str = ""
    run_id: str | None = None
    checkpoint_id: str | None = None
    data_version: str | None = None
    evaluation_id: str | None = None
    code_commit: str = ""
    metrics: dict[str, float] = Field(default_factory=dict)


class AdapterShape(Config):
    """What an engine must allow to load a LoRA adapter, read from its files."""

    rank: int = Field(ge=1)
    alpha: float
    target_modules: tuple[str, ...]


class Artifact(Config):
    """Files that lie in the version store, whole. `digest` is `cluster.storage.digest_folder` of `path`."""

    path: Path
    digest: str
    adapter: AdapterShape | None = None


class Version(VersionFact, Fact):
    """A registered version: its number never changes, nor do the files at `path`."""

    event: ClassVar[str] = "version"
    id: str
    number: int = Field(ge=1)
    digest: str
    path: Path
    adapter: AdapterShape | None = None
    created_at: datetime


class AliasMove(Fact):
    """An alias moved. `previous` is where it stood, `command` the caller's id of the request."""

    event: ClassVar[str] = "alias"
    id: str
    name: str
    alias: str
    version: int
    previous: int | None
    by: str
    why: str
    at: datetime
    action: Literal["promote", "rollback"] = "promote"
    command: str


@dataclass(frozen=True)
class Register:
    """Make the stored `artifact` a version."""

    fact: VersionFact
    artifact: Artifact


@dataclass(frozen=True)
class Promote:
    """Move an alias. `expected`: where it must stand now (0: it must not exist); None: wherever it stands."""

    name: str
    alias: str
    version: int
    by: str
    why: str
    command: str
    expected: int | None = None


@dataclass(frozen=True)
class Rollback:
    """Move an alias back to where it stood before its last promotion that has not been undone."""

    name: str
    alias: str
    by: str
    why: str
    command: str


AnyFact = TypeVar("AnyFact", bound=DataFact | RunFact | CheckpointFact | EvaluationFact)
Command = DataFact | RunFact | CheckpointFact | RunEnded | EvaluationFact | Register | Promote | Rollback

_FACTS: Final[Mapping[str, type[Fact]]] = {
    fact.event: fact for fact in (DataFact, RunFact, CheckpointFact, RunEnded, EvaluationFact, Version, AliasMove)
}


@dataclass(frozen=True)
class Event:
    """A fact in the log: its place, when it was acknowledged, and who said it."""

    seq: int
    at: datetime
    by: str
    fact: Fact


@dataclass(frozen=True)
class Decision:
    """What a command adds to the log (nothing, if it was known already) and what its caller is told."""

    facts: tuple[Fact, ...]
    answer: Fact


@dataclass(frozen=True)
class State:
    """All that the log says. The mappings are never changed once a state has been handed out."""

    seq: int = 0
    at: datetime | None = None
    snapshot_number: int = 0
    """`seq` of the last event that a server has to know."""
    entries: Mapping[str, Event] = field(default_factory=dict)
    """Every data version, run, checkpoint, evaluation, version and alias move by its id, in the order of the log."""
    ended: Mapping[str, RunEnded] = field(default_factory=dict)
    by_content: Mapping[tuple[str, str], Version] = field(default_factory=dict)
    """Version by (name, digest)."""
    versions: Mapping[str, tuple[Version, ...]] = field(default_factory=dict)
    """Versions by name; number n stands at index n - 1."""
    moves: Mapping[tuple[str, str], tuple[AliasMove, ...]] = field(default_factory=dict)
    """Moves by (name, alias), oldest first."""
    standing: Mapping[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    """Versions by (name, alias) that rollbacks would go through; the last one is where the alias stands."""
    commands: Mapping[str, AliasMove] = field(default_factory=dict)

    def alias(self, name: str, alias: str) -> int | None:
        """Number of the version at which the alias stands."""
        standing = self.standing.get((name, alias))
        return standing[-1] if standing else None

    def aliases(self, name: str) -> dict[str, int]:
        """Every alias of `name` with the version at which it stands."""
        return {alias: standing[-1] for (owner, alias), standing in self.standing.items() if owner == name}

    def aliases_at(self, name: str, moment: datetime) -> dict[str, int]:
        """Where the aliases of `name` stood at `moment`."""
        then: dict[str, int] = {}
        for (owner, alias), moves in self.moves.items():
            if owner == name:
                earlier = [move.version for move in moves if move.at <= moment]
                then |= {alias: earlier[-1]} if earlier else {}
        return then

    def run_status(self, run_id: str) -> RunStatus:
        """Status of a known run."""
        return self.ended[run_id].status if run_id in self.ended else "running"

    def running(self) -> list[RunFact]:
        """Runs that have not ended."""
        return [
            event.fact
            for event in self.entries.values()
            if isinstance(event.fact, RunFact) and event.fact.id not in self.ended
        ]


def encode(fact: Fact) -> str:
    """The fact as the log keeps it."""
    return fact.model_dump_json()


def decode(event: str, body: str) -> Fact:
    """The fact of a line of the log; `StateError` for one that a newer Flywheel has written."""
    if event not in _FACTS:
        raise StateError(
            f"The registry's log holds an event {event!r}, which this version of Flywheel does not know.",
            hint="Run the version of Flywheel that wrote it, or a newer one.",
        )
    return _FACTS[event].model_validate_json(body)


def decide(state: State, command: Command, *, now: datetime) -> Decision:
    """What `command` adds to the log at `now`.

    Raises `RequestError` (404) for an unknown id and (400) for a value that cannot be, `StateError` for a move that
    the present state does not allow.
    """
    match command:
        case Register():
            return _register(state, command, now)
        case Promote():
            return _promote(state, command, now)
        case Rollback():
            return _rollback(state, command, now)
        case RunFact():
            return _begin(state, command)
        case RunEnded():
            return _end(state, command)
        case CheckpointFact():
            return _checkpoint(state, command)
        case _:
            return _record(state, command)


def check(state: State, fact: VersionFact) -> None:
    """Raise what `Register` of `fact` would raise, whatever its content: before gigabytes are copied."""
    _require_name(fact.name, "name")
    for known in state.versions.get(fact.name, ())[-1:]:
        if known.kind != fact.kind:
            raise StateError(
                f"{fact.name!r} holds versions of kind {known.kind}, not {fact.kind}.",
                hint="Register it under another name.",
            )
    _require_known(
        state,
        {id_ for id_ in (fact.run_id, fact.checkpoint_id, fact.data_version, fact.evaluation_id) if id_},
    )


def apply(state: State, event: Event) -> State:
    """`state` with one more event. `state` itself stays as it is."""
    draft = _Draft(state)
    draft.put(event)
    return draft.finished()


def replay(events: Iterable[Event], state: State | None = None) -> State:
    """The state that a log leads to, in one pass."""
    draft = _Draft(state or State())
    for event in events:
        draft.put(event)
    return draft.finished()


def snapshot(state: State) -> Snapshot:
    """What servers have to know of `state`."""
    return Snapshot(
        number=state.snapshot_number,
        versions={
            version.id: Route(
                name=version.name,
                version=version.number,
                kind=version.kind,
                path=version.path,
                digest=version.digest,
                base=version.base,
            )
            for versions in state.versions.values()
            for version in versions
        },
        aliases={f"{name}@{alias}": standing[-1] for (name, alias), standing in state.standing.items()},
    )


def version_of(state: State, name: str, number: int) -> Version:
    """A registered version; `RequestError` (404) if there is none."""
    versions = state.versions.get(name, ())
    if not 1 <= number <= len(versions):
        raise unknown(state, f"{name}/{number}")
    return versions[number - 1]


def unknown(state: State, id_: str) -> RequestError:
    """The error for an id that the registry has never seen, with the nearest ones it has."""
    near = difflib.get_close_matches(id_, [*state.entries, *state.versions], n=3, cutoff=0.5)
    return RequestError(
        f"The registry knows nothing called {id_!r}.",
        status=404,
        code="not_found",
        hint=f"Near it: {', '.join(near)}." if near else "See `flywheel models list`.",
    )


class _Draft:
    """A state being built: one shallow copy, then any number of events."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._seq, self._at, self._snapshot_number = state.seq, state.at, state.snapshot_number
        self._entries = dict(state.entries)
        self._ended = dict(state.ended)
        self._by_content = dict(state.by_content)
        self._versions = dict(state.versions)
        self._moves = dict(state.moves)
        self._standing = dict(state.standing)
        self._commands = dict(state.commands)

    def put(self, event: Event) -> None:
        self._seq, self._at = event.seq, event.at
        match event.fact:
            case RunEnded() as ended:
                self._ended[ended.run_id] = ended
                return
            case RunFact() as run:
                self._ended.pop(run.id, None)
            case Version() as version:
                self._by_content[version.name, version.digest] = version
                self._versions[version.name] = (*self._versions.get(version.name, ()), version)
                self._snapshot_number = event.seq
            case AliasMove() as move:
                key = (move.name, move.alias)
                standing = self._standing.get(key, ())
                self._standing[key] = standing[:-1] if move.action == "rollback" else (*standing, move.version)
                self._moves[key] = (*self._moves.get(key, ()), move)
                self._commands[move.command] = move
                self._snapshot_number = event.seq
        self._entries[_id_of(event.fact)] = event

    def finished(self) -> State:
        return replace(
            self._state,
            seq=self._seq,
            at=self._at,
            snapshot_number=self._snapshot_number,
            entries=self._entries,
            ended=self._ended,
            by_content=self._by_content,
            versions=self._versions,
            moves=self._moves,
            standing=self._standing,
            commands=self._commands,
        )


def _id_of(fact: Fact) -> str:
    assert isinstance(fact, DataFact | RunFact | CheckpointFact | EvaluationFact | Version | AliasMove)
    return fact.id


def _record(state: State, fact: DataFact | EvaluationFact) -> Decision:
    if (known := _known(state, fact)) is not None:
        if encode(known) != encode(fact):
            raise StateError(
                f"{fact.id!r} is recorded with other facts already; facts do not change.",
                hint="Give the new one its own id.",
            )
        return Decision((), known)
    above = (fact.parent,) if isinstance(fact, DataFact) else (fact.run_id, fact.checkpoint_id, fact.data_version)
    _require_known(state, {id_ for id_ in above if id_})
    return Decision((fact,), fact)


def _begin(state: State, run: RunFact) -> Decision:
    known = _known(state, run)
    if known is None:
        _require_known(state, {run.data_version} if run.data_version else set())
        return Decision((run,), run)
    before, after = known.model_dump(mode="json"), run.model_dump(mode="json")
    changed = [name for name in after if name not in ("driver", "tracking_run") and before[name] != after[name]]
    if changed:
        raise StateError(
            f"Run {run.id!r} began with another {', '.join(changed)}.",
            hint="Start a new run for changed settings.",
        )
    ended = state.ended.get(run.id)
    if ended is None:
        if known.driver != run.driver:
            raise StateError(
                f"Run {run.id!r} is being driven by another process.", hint="Wait for it, or stop it first."
            )
        return Decision((), known)
    if ended.status == "completed":
        raise StateError(f"Run {run.id!r} is completed.", hint="Start a new run.")
    return Decision((run,), run)


def _end(state: State, ended: RunEnded) -> Decision:
    _require_known(state, {ended.run_id}, RunFact)
    before = state.ended.get(ended.run_id)
    if before == ended or (before is not None and ended.presumed):
        return Decision((), before)
    # What a run says of itself outweighs what was concluded from its silence.
    if before is not None and not before.presumed:
        raise StateError(f"Run {ended.run_id!r} has ended already: {before.status}.", hint="A run ends once.")
    return Decision((ended,), ended)


def _checkpoint(state: State, fact: CheckpointFact) -> Decision:
    known = _known(state, fact)
    if known is not None and encode(known) == encode(fact):
        return Decision((), known)
    _require_known(state, {fact.run_id}, RunFact)
    ended = state.ended.get(fact.run_id)
    if ended is not None and not ended.presumed:
        raise StateError(
            f"Run {fact.run_id!r} is {ended.status}; it takes no more checkpoints.",
            hint="Take the run up again.",
        )
    # A run that went back to an earlier commit writes the same step again: the later one is what lies on disk.
    if known is not None:
        for event in state.entries.values():
            if isinstance(event.fact, Version | EvaluationFact) and event.fact.checkpoint_id == fact.id:
                raise StateError(
                    f"Checkpoint {fact.id!r} has been used by {event.fact.id!r}; it does not change any more.",
                    hint="Go on from it in a new run.",
                )
    return Decision((fact,), fact)


def _register(state: State, command: Register, now: datetime) -> Decision:
    fact, artifact = command.fact, command.artifact
    check(state, fact)
    known = state.by_content.get((fact.name, artifact.digest))
    if known is not None:
        return Decision((), known)
    number = len(state.versions.get(fact.name, ())) + 1
    version = Version(
        **dict(fact),
        id=f"{fact.name}/{number}",
        number=number,
        digest=artifact.digest,
        path=artifact.path,
        adapter=artifact.adapter,
        created_at=now,
    )
    return Decision((version,), version)


def _promote(state: State, command: Promote, now: datetime) -> Decision:
    if (made := state.commands.get(command.command)) is not None:
        return Decision((), made)
    _require_alias(command.alias)
    _require_reason(command.by, command.why)
    version_of(state, command.name, command.version)
    moves = state.moves.get((command.name, command.alias), ())
    current = state.alias(command.name, command.alias)
    # Before anything else: who expects one thing and finds another has to know, also where the move is made already.
    if command.expected is not None and command.expected != (current or 0):
        raise StateError(
            f"{command.name}@{command.alias} stands at {_at(current)}, not at {_at(command.expected or None)}; "
            f"it was not moved to version {command.version}.",
            hint="Somebody moved it meanwhile: look at its history, then decide again.",
        )
    if current == command.version:
        return Decision((), moves[-1])
    move = _move(command, len(moves) + 1, command.version, current, now)
    return Decision((move,), move)


def _rollback(state: State, command: Rollback, now: datetime) -> Decision:
    if (made := state.commands.get(command.command)) is not None:
        return Decision((), made)
    _require_reason(command.by, command.why)
    if command.name not in state.versions:
        raise unknown(state, command.name)
    key = (command.name, command.alias)
    standing = state.standing.get(key, ())
    if len(standing) < 2:
        raise StateError(
            f"{command.name}@{command.alias} has no earlier version to go back to; it stands at "
            f"{_at(standing[-1] if standing else None)}.",
            hint=f"Promote a version by number; {command.name} has 1 to {len(state.versions[command.name])}.",
        )
    move = _move(command, len(state.moves[key]) + 1, standing[-2], standing[-1], now)
    return Decision((move,), move)


def _move(command: Promote | Rollback, ordinal: int, version: int, previous: int | None, now: datetime) -> AliasMove:
    return AliasMove(
        id=f"{command.name}@{command.alias}#{ordinal}",
        name=command.name,
        alias=command.alias,
        version=version,
        previous=previous,
        by=command.by,
        why=command.why,
        at=now,
        action="rollback" if isinstance(command, Rollback) else "promote",
        command=command.command,
    )


def _known(state: State, fact: AnyFact) -> AnyFact | None:
    event = state.entries.get(fact.id)
    if event is None:
        if not fact.id or "#" in fact.id:
            raise RequestError(f"{fact.id!r} cannot be an id.", param="id", hint="Ids are not empty and hold no '#'.")
        return None
    if not isinstance(event.fact, type(fact)):
        raise StateError(f"{fact.id!r} is the id of a {event.fact.event} already.", hint="Choose another id.")
    return event.fact


def _require_known(state: State, ids: Iterable[str], kind: type[Fact] = Fact) -> None:
    for id_ in sorted(ids):
        event = state.entries.get(id_)
        if event is None or not isinstance(event.fact, kind):
            raise unknown(state, id_)


def _require_name(name: str, param: str) -> None:
    if not NAME_PATTERN.fullmatch(name):
        raise RequestError(
            f"{name!r} cannot be a {param}.",
            param=param,
            hint="Use 1 to 63 lower-case letters, digits, '.', '_' or '-', starting with a letter or digit.",
        )


def _require_alias(alias: str) -> None:
    _require_name(alias, "alias")
    if RESERVED_ALIAS.fullmatch(alias):
        raise RequestError(
            f"The alias {alias!r} is reserved.", param="alias", hint="Choose a role: champion, canary, …"
        )


def _require_reason(by: str, why: str) -> None:
    for param, value in (("by", by), ("why", why)):
        if not value.strip():
            raise RequestError(
                f"An alias moves only with a {param!r}.",
                param=param,
                hint="History is kept for ever; say it.",
            )


def _at(version: int | None) -> str:
    return "no version" if version is None else f"version {version}"
