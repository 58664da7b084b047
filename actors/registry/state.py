"""The registry's state: what its log says, folded into mappings. Pure; nothing here decides what may happen.

`apply` folds one event into the state; `replay` folds a whole log. Nothing here knows Ray, SQL, MLflow, files or
clocks.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path

from actors.registry.apikeys import ApiKey
from actors.registry.facts import (
    AliasMove,
    ApiKeyCreated,
    ApiKeyRevoked,
    CheckpointFact,
    Collected,
    DataFact,
    EvaluationFact,
    Event,
    ExternalMove,
    Fact,
    FeedbackFact,
    GateBegun,
    GateEnded,
    Pinned,
    Restored,
    Retired,
    RunEnded,
    RunFact,
    RunIncident,
    RunStatus,
    Stage,
    Version,
)
from actors.registry.snapshot import Model, Route, Snapshot, Split, heaviest
from cluster.errors import RequestError


@dataclass(frozen=True)
class State:
    """All that the log says. The mappings are never changed once a state has been handed out."""

    seq: int = 0
    at: datetime | None = None
    snapshot_number: int = 0
    """`seq` of the last event that a server has to know."""
    entries: Mapping[str, Event] = field(default_factory=dict)
    """Everything with an id of its own (data, runs, checkpoints, evaluations, versions, gates, moves, …), in order."""
    ended: Mapping[str, RunEnded] = field(default_factory=dict)
    """How runs ended, by run."""
    by_content: Mapping[tuple[str, str], Version] = field(default_factory=dict)
    """Version by (name, digest)."""
    versions: Mapping[str, tuple[Version, ...]] = field(default_factory=dict)
    """Versions by name; number n stands at index n - 1."""
    stages: Mapping[str, Stage] = field(default_factory=dict)
    """Stage by version id."""
    gates: Mapping[str, tuple[GateBegun, ...]] = field(default_factory=dict)
    """Gates by version id, oldest first."""
    verdicts: Mapping[str, GateEnded] = field(default_factory=dict)
    """How gates ended, by gate."""
    moves: Mapping[tuple[str, str], tuple[AliasMove, ...]] = field(default_factory=dict)
    """Moves by (name, alias), oldest first."""
    standing: Mapping[tuple[str, str], tuple[Split, ...]] = field(default_factory=dict)
    """Splits by (name, alias) that rollbacks would go through; the last one is where the alias stands."""
    pins: Mapping[str, Pinned] = field(default_factory=dict)
    """Pins that hold, by version id."""
    collected: frozenset[str] = frozenset()
    """Versions whose files have been freed."""
    history: Mapping[str, tuple[Event, ...]] = field(default_factory=dict)
    """What happened to a name and its versions, by name, in order."""
    commands: Mapping[str, Fact] = field(default_factory=dict)
    """What a caller's command became, by its id."""
    models: Mapping[str, Model] = field(default_factory=dict)
    """What servers know, by name."""
    keys: Mapping[str, ApiKeyCreated] = field(default_factory=dict)
    """Every API key that there has been, by id. Not among `entries`: nothing is made from a key."""
    revoked: Mapping[str, ApiKeyRevoked] = field(default_factory=dict)
    """How API keys ended, by id."""
    live_keys: Mapping[str, ApiKey] = field(default_factory=dict)
    """What servers know of the keys that are not revoked, by id."""

    def split(self, name: str, alias: str) -> Split | None:
        """Where the alias stands; None if there is no such alias."""
        standing = self.standing.get((name, alias))
        return standing[-1] if standing else None

    def splits(self, name: str) -> dict[str, Split]:
        """Where every alias of `name` stands."""
        return {alias: standing[-1] for (owner, alias), standing in self.standing.items() if owner == name}

    def aliases(self, name: str) -> dict[str, int]:
        """Every alias of `name` with the version that has most of its traffic."""
        return {alias: heaviest(split) for alias, split in self.splits(name).items()}

    def moves_at(self, name: str, moment: datetime) -> dict[str, AliasMove]:
        """For every alias of `name` the move that had put it where it stood at `moment`."""
        then: dict[str, AliasMove] = {}
        for (owner, alias), moves in self.moves.items():
            if owner == name:
                earlier = [move for move in moves if move.at <= moment]
                then |= {alias: earlier[-1]} if earlier else {}
        return then

    def open_gate(self, version_id: str) -> GateBegun | None:
        """The gate that is measuring a version, if one is."""
        gates = self.gates.get(version_id, ())
        return gates[-1] if gates and gates[-1].id not in self.verdicts else None

    def verdict(self, version_id: str) -> GateEnded | None:
        """The last verdict of a gate on a version, abandoned ones aside."""
        for gate in reversed(self.gates.get(version_id, ())):
            ended = self.verdicts.get(gate.id)
            if ended is not None and ended.outcome != "abandoned":
                return ended
        return None

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

    def measuring(self) -> list[GateBegun]:
        """Gates that have not ended."""
        return [gates[-1] for gates in self.gates.values() if gates[-1].id not in self.verdicts]


def apply(state: State, event: Event) -> State:
    """`state` with one more event. `state` itself stays as it is."""
    return replay((event,), state)


def replay(events: Iterable[Event], state: State | None = None) -> State:
    """The state that a log leads to, in one pass."""
    draft = _Draft(state or State())
    for event in events:
        draft.put(event)
    return draft.finished()


def snapshot(state: State, *, epoch: int = 0, root: Path = Path()) -> Snapshot:
    """What servers have to know of `state`; `root` is the version store."""
    return Snapshot(epoch, state.snapshot_number, root, state.models, state.live_keys)


def held(state: State) -> dict[str, str]:
    """Why the files of a version must stay, by version id; whatever is not in it may be freed.

    Held by: a pin, an alias or a place that a rollback can go to, a gate or a run that goes on, and by being the
    parent of a version that is held.
    """
    why: dict[str, str] = {}
    for (name, alias), standing in state.standing.items():
        for place, split in enumerate(reversed(standing)):
            for number in split:
                id_ = f"{name}/{number}"
                if place == 0 or state.stages[id_] != "retired":
                    why.setdefault(id_, f"{name}@{alias}" + (" can be rolled back to it" if place else " stands at it"))
    why |= {id_: f"pinned by {pin.by}: {pin.why}" for id_, pin in state.pins.items()}
    why |= {gate.version_id: f"{gate.id} goes on" for gate in state.measuring()}
    running = {run.id: run for run in state.running()}
    for run in running.values():
        if run.base in state.stages:
            why.setdefault(run.base, f"run {run.id} trains on it")
    for version in (version for versions in state.versions.values() for version in versions):
        if version.run_id in running:
            why.setdefault(version.id, f"run {version.run_id} goes on")
    waiting = list(why)
    while waiting:
        fact = state.entries[waiting.pop()].fact
        if isinstance(fact, Version) and fact.parent and fact.parent in state.stages and fact.parent not in why:
            why[fact.parent] = f"{fact.id} was made from it"
            waiting.append(fact.parent)
    return why


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


def id_of(fact: Fact) -> str | None:
    """The id under which a fact stands in `State.entries`; None for one that only changes another."""
    match fact:
        case (
            DataFact()
            | FeedbackFact()
            | RunFact()
            | CheckpointFact()
            | RunIncident()
            | EvaluationFact()
            | Version()
            | GateBegun()
            | AliasMove()
            | ExternalMove()
            | Retired()
        ):
            return fact.id
        case _:
            return None


def versions_of(fact: Fact) -> set[str]:
    """Ids of the versions that a fact happened to."""
    match fact:
        case Version():
            return {fact.id}
        case GateBegun() | Retired() | Pinned() | Restored():
            return {fact.version_id}
        case GateEnded():
            return {fact.gate_id.partition("#")[0]}
        case AliasMove():
            return {f"{fact.name}/{number}" for number in (*fact.split, *fact.previous_split)}
        case Collected():
            return {*fact.version_ids}
        case _:
            return set()


def _names(fact: Fact) -> set[str]:
    """The registered names that a fact is about."""
    return {fact.name} if isinstance(fact, ExternalMove) else {id_.rpartition("/")[0] for id_ in versions_of(fact)}


def _key(fact: ApiKeyCreated) -> ApiKey:
    return ApiKey(**{each.name: getattr(fact, each.name) for each in fields(ApiKey)})


class _Draft:
    """A state being built: one shallow copy, then any number of events."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.seq, self.at, self.snapshot_number = state.seq, state.at, state.snapshot_number
        self.entries = dict(state.entries)
        self.ended = dict(state.ended)
        self.by_content = dict(state.by_content)
        self.versions = dict(state.versions)
        self.stages = dict(state.stages)
        self.gates = dict(state.gates)
        self.verdicts = dict(state.verdicts)
        self.moves = dict(state.moves)
        self.standing = dict(state.standing)
        self.pins = dict(state.pins)
        self.collected = state.collected
        self.history = dict(state.history)
        self.commands = dict(state.commands)
        self.models = dict(state.models)
        self.keys = dict(state.keys)
        self.revoked = dict(state.revoked)
        self.live_keys = dict(state.live_keys)

    def put(self, event: Event) -> None:
        self.seq, self.at = event.seq, event.at
        fact = event.fact
        if (id_ := id_of(fact)) is not None:
            self.entries[id_] = event
        match fact:
            case RunFact():
                self.ended.pop(fact.id, None)
            case RunEnded():
                self.ended[fact.run_id] = fact
            case Version():
                self.by_content[fact.name, fact.digest] = fact
                self.versions[fact.name] = (*self.versions.get(fact.name, ()), fact)
                self.stages[fact.id] = "candidate"
                self._serve(fact)
            case GateBegun():
                self.gates[fact.version_id] = (*self.gates.get(fact.version_id, ()), fact)
                self.stages[fact.version_id] = "evaluating"
                self.commands[fact.command] = fact
            case GateEnded():
                self._end_gate(fact)
            case AliasMove():
                self._move(fact)
            case Retired():
                self.stages[fact.version_id] = "retired"
                self.commands[fact.command] = fact
                self._withdraw(fact.version_id)
            case Pinned():
                self.pins.pop(fact.version_id, None)
                if fact.pinned:
                    self.pins[fact.version_id] = fact
            case Collected():
                self.collected |= set(fact.version_ids)
                for version_id in fact.version_ids:
                    self._withdraw(version_id)
            case Restored():
                self._restore(fact)
            case ApiKeyCreated():
                self.keys[fact.id] = fact
                self.live_keys[fact.id] = _key(fact)
                self.snapshot_number = self.seq
            case ApiKeyRevoked():
                self.revoked[fact.key_id] = fact
                self.live_keys.pop(fact.key_id, None)
                self.commands[fact.command] = fact
                self.snapshot_number = self.seq
        for name in _names(fact):
            self.history[name] = (*self.history.get(name, ()), event)

    def finished(self) -> State:
        return replace(self._state, **{each.name: getattr(self, each.name) for each in fields(State)})

    def _end_gate(self, fact: GateEnded) -> None:
        self.verdicts[fact.gate_id] = fact
        begun = self.entries[fact.gate_id].fact
        assert isinstance(begun, GateBegun)
        if self.stages[begun.version_id] == "evaluating":  # it may have been promoted by force meanwhile
            self.stages[begun.version_id] = begun.was if fact.outcome == "abandoned" else fact.outcome

    def _move(self, fact: AliasMove) -> None:
        key = (fact.name, fact.alias)
        standing = self.standing.get(key, ())
        if fact.action == "rollback":
            # To the last earlier place that is the same; the places between were not fit to go back to.
            depth = max(place for place, split in enumerate(standing[:-1]) if split == fact.split)
            self.standing[key] = standing[: depth + 1]
        else:
            self.standing[key] = (*standing, fact.split)
        self.moves[key] = (*self.moves.get(key, ()), fact)
        self.commands[fact.command] = fact
        for number in fact.split:
            self.stages[f"{fact.name}/{number}"] = "promoted"
        model = self.models[fact.name]
        self.models[fact.name] = replace(model, aliases={**model.aliases, fact.alias: fact.split})
        self.snapshot_number = self.seq

    def _serve(self, version: Version) -> None:
        route = Route(version.name, version.number, version.kind, version.path, version.digest, version.base)
        model = self.models.get(version.name, Model(version.name))
        versions = {**model.versions, version.number: route}
        if version.number < max(versions):  # one that had been collected comes back into its place
            versions = dict(sorted(versions.items()))
        self.models[version.name] = Model(version.name, versions, model.aliases)
        self.snapshot_number = self.seq

    def _withdraw(self, version_id: str) -> None:
        name, _, number = version_id.rpartition("/")
        model = self.models[name]
        left = {other: route for other, route in model.versions.items() if other != int(number)}
        self.models[name] = replace(model, versions=left)
        self.snapshot_number = self.seq

    def _restore(self, fact: Restored) -> None:
        name, _, number = fact.version_id.rpartition("/")
        versions = self.versions[name]
        there = versions[int(number) - 1].model_copy(update={"path": fact.path})
        self.versions[name] = (*versions[: there.number - 1], there, *versions[there.number :])
        self.by_content[name, there.digest] = there
        self.entries[there.id] = replace(self.entries[there.id], fact=there)
        self.collected -= {fact.version_id}
        if self.stages[fact.version_id] != "retired":
            self._serve(there)
