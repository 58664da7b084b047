"""What a person or the command line is shown of the registry. Pure: each view is a function of a `State`."""

from datetime import datetime
from pathlib import Path
from typing import Literal

from actors.registry.lineage import Link, chain
from actors.registry.mirror import MirrorStatus
from actors.registry.snapshot import Kind, resolve
from actors.registry.state import (
    AliasMove,
    CheckpointFact,
    EvaluationFact,
    RunFact,
    RunStatus,
    State,
    Version,
    snapshot,
    unknown,
    version_of,
)
from cluster.config import Config
from cluster.errors import RequestError


class ModelView(Config):
    """One registered name."""

    name: str
    kind: Kind
    base: str
    versions: tuple[Version, ...]
    """Oldest first."""
    aliases: dict[str, int]


class RunView(Config):
    """One run and how it stands."""

    run: RunFact
    status: RunStatus
    verdict: str
    begun_at: datetime
    checkpoints: tuple[CheckpointFact, ...]


class VersionView(Config):
    """One version with all that is known of it. `passed` is its evaluation's gate."""

    version: Version
    aliases: tuple[str, ...]
    moves: tuple[AliasMove, ...]
    """Moves of aliases to this version, oldest first."""
    evaluation: EvaluationFact | None
    run: RunView | None
    lineage: tuple[Link, ...]


class HistoryEntry(Config):
    """One thing that happened to a name: who, when, why, from where to where."""

    at: datetime
    by: str
    what: Literal["registered", "promote", "rollback"]
    version: int
    alias: str | None = None
    previous: int | None = None
    why: str = ""


class RegistryStatus(Config):
    """The registry itself. `events` is the length of its log, `mirror` is None if nothing is behind it."""

    pid: int
    epoch: int
    home: Path
    database: str
    started_at: datetime
    events: int
    snapshot: int
    models: int
    running: tuple[str, ...]
    """Ids of runs that go on."""
    mirror: MirrorStatus | None


def models(state: State) -> tuple[ModelView, ...]:
    """Every registered name."""
    return tuple(
        ModelView(
            name=name,
            kind=versions[-1].kind,
            base=versions[-1].base,
            versions=versions,
            aliases=state.aliases(name),
        )
        for name, versions in sorted(state.versions.items())
    )


def version(state: State, reference: str) -> VersionView:
    """The version that `name`, `name@alias` or `name/3` means; a name without a champion means its newest version."""
    try:
        route = resolve(snapshot(state), reference)
        found = version_of(state, route.name, route.version)
    except RequestError:
        if reference not in state.versions:
            raise
        found = state.versions[reference][-1]
    moves = [move for (name, _), moves in state.moves.items() if name == found.name for move in moves]
    event = state.entries.get(found.evaluation_id) if found.evaluation_id else None
    return VersionView(
        version=found,
        aliases=tuple(sorted(alias for alias, number in state.aliases(found.name).items() if number == found.number)),
        moves=tuple(sorted((move for move in moves if move.version == found.number), key=lambda move: move.at)),
        evaluation=event.fact if event is not None and isinstance(event.fact, EvaluationFact) else None,
        run=run(state, found.run_id) if found.run_id else None,
        lineage=tuple(chain(state, found.id)),
    )


def run(state: State, run_id: str) -> RunView:
    """One run; `RequestError` (404) if there is none."""
    event = state.entries.get(run_id)
    if event is None or not isinstance(event.fact, RunFact):
        raise unknown(state, run_id)
    checkpoints = [entry.fact for entry in state.entries.values() if isinstance(entry.fact, CheckpointFact)]
    return RunView(
        run=event.fact,
        status=state.run_status(run_id),
        verdict=state.ended[run_id].verdict if run_id in state.ended else "",
        begun_at=event.at,
        checkpoints=tuple(
            sorted(
                (checkpoint for checkpoint in checkpoints if checkpoint.run_id == run_id),
                key=lambda c: c.step,
            )
        ),
    )


def runs(state: State) -> tuple[RunView, ...]:
    """Every run, the newest first."""
    ids = [id_ for id_, event in state.entries.items() if isinstance(event.fact, RunFact)]
    return tuple(run(state, id_) for id_ in reversed(ids))


def history(state: State, name: str) -> tuple[HistoryEntry, ...]:
    """Everything that happened to `name`, oldest first; `RequestError` (404) if it is not registered."""
    if name not in state.versions:
        raise unknown(state, name)
    entries = []
    for event in state.entries.values():
        match event.fact:
            case Version(name=owner) as fact if owner == name:
                entries.append(HistoryEntry(at=event.at, by=event.by, what="registered", version=fact.number))
            case AliasMove(name=owner) as move if owner == name:
                entries.append(
                    HistoryEntry(
                        at=move.at,
                        by=move.by,
                        what=move.action,
                        version=move.version,
                        alias=move.alias,
                        previous=move.previous,
                        why=move.why,
                    )
                )
    return tuple(entries)


def aliases_at(state: State, name: str, moment: datetime) -> dict[str, int]:
    """Where the aliases of `name` stood at `moment`; `RequestError` if it is not registered or has no time zone."""
    if name not in state.versions:
        raise unknown(state, name)
    if moment.tzinfo is None:
        raise RequestError(f"{moment} has no time zone.", param="at", hint="Write 2026-01-31T12:00:00+00:00.")
    return state.aliases_at(name, moment)
