"""What a person or the command line is shown of the registry. Pure: each view is a function of a `State`."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Final, Literal

from actors.registry.apikeys import Period, Role, period_start
from actors.registry.facts import (
    AliasMove,
    ApiKeyCreated,
    CheckpointFact,
    Collected,
    EvaluationFact,
    Event,
    ExternalMove,
    GateBegun,
    GateEnded,
    Pinned,
    Restored,
    Retired,
    RunFact,
    RunIncident,
    RunStatus,
    Stage,
    Version,
)
from actors.registry.gc import Item
from actors.registry.lineage import Link, chain
from actors.registry.mirror import MirrorStatus
from actors.registry.serving import Holding, KeyUse, Traffic
from actors.registry.snapshot import Kind, Split, heaviest, resolve
from actors.registry.state import State, snapshot, unknown, version_of
from cluster.config import Config
from cluster.errors import RequestError

_LONGEST_NUMBER: Final = 9


class ModelView(Config):
    """One registered name. `aliases` names the version with most of an alias's traffic, `splits` all of them."""

    name: str
    kind: Kind
    base: str
    versions: tuple[Version, ...]
    """Oldest first."""
    stages: tuple[Stage, ...]
    """Stage of each version."""
    aliases: dict[str, int]
    splits: dict[str, Split]


class KeyView(Config):
    """One API key; neither its secret nor the hash of it. `revoked_at` None: it is live, until it expires."""

    id: str
    name: str
    roles: tuple[Role, ...]
    models: tuple[str, ...]
    rpm: int | None
    tpm: int | None
    budget_tokens: int | None
    budget_period: Period | None
    expires_at: datetime | None
    created_at: datetime
    created_by: str
    revoked_at: datetime | None
    revoked_by: str | None
    why: str | None


class UseView(Config):
    """What an API key was charged in some time."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    estimated_tokens: int = 0
    """Of answers whose client left before they were counted."""

    @property
    def tokens(self) -> int:
        """What counts for a budget."""
        return self.prompt_tokens + self.completion_tokens + self.estimated_tokens


class KeyUseView(Config):
    """One API key and what it was charged, as its gateways have reported. `budget_used`: None without a budget."""

    id: str
    name: str
    today: UseView
    month: UseView
    total: UseView
    days: dict[date, UseView]
    budget_tokens: int | None
    budget_period: Period | None
    budget_used: int | None


class RunView(Config):
    """One run and how it stands."""

    run: RunFact
    status: RunStatus
    verdict: str
    begun_at: datetime
    checkpoints: tuple[CheckpointFact, ...]
    incidents: tuple[RunIncident, ...] = ()
    """What happened to its workers, oldest first."""


class VersionView(Config):
    """One version with all that is known of it."""

    version: Version
    stage: Stage
    gate: GateEnded | None
    """The last verdict of a gate on it."""
    pinned: Pinned | None
    collected: bool
    """Whether its files have been freed."""
    aliases: tuple[str, ...]
    """Aliases that give it traffic."""
    moves: tuple[AliasMove, ...]
    """Moves of aliases to this version, oldest first."""
    evaluation: EvaluationFact | None
    run: RunView | None
    lineage: tuple[Link, ...]


class HistoryEntry(Config):
    """One thing that happened to a name: who, when, why, from where to where."""

    at: datetime
    by: str
    what: Literal[
        "registered",
        "gate begun",
        "gate passed",
        "gate blocked",
        "gate abandoned",
        "promote",
        "rollback",
        "external",
        "external refused",
        "retired",
        "pinned",
        "unpinned",
        "files freed",
        "files restored",
    ]
    version: int | None
    alias: str | None = None
    split: Split | None = None
    previous: int | None = None
    forced: bool = False
    why: str = ""


class LiveView(Config):
    """Where an alias stood at a moment, and the move that had put it there, with the gate's last word before that."""

    alias: str
    split: Split
    move: AliasMove
    gates: tuple[GateEnded, ...]


class Difference(Config):
    """One fact in which two versions differ."""

    fact: str
    first: str
    second: str


class Freed(Config):
    """Something that was (or, in a dry run, would be) deleted, and why nothing needs it."""

    what: str
    path: Path
    size_bytes: int
    why: str


class Collection(Config):
    """What a garbage collection freed; why versions stay, by id; and what it had to leave, by path."""

    dry_run: bool
    freed: tuple[Freed, ...]
    kept: dict[str, str]
    left: dict[str, str]


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


def key_use(key: KeyView, uses: Iterable[KeyUse], now: datetime) -> KeyUseView:
    """What one key was charged in this UTC day, this month, and by day; `uses` may hold other keys', too."""
    mine = [use for use in uses if use.key_id == key.id]
    days = {day: _added(use for use in mine if use.day == day) for day in sorted({use.day for use in mine})}
    periods: dict[Period, UseView] = {
        period: _added(use for use in mine if use.hour >= period_start(period, now)) for period in ("day", "month")
    }
    return KeyUseView(
        id=key.id,
        name=key.name,
        today=periods["day"],
        month=periods["month"],
        total=_added(mine),
        days=days,
        budget_tokens=key.budget_tokens,
        budget_period=key.budget_period,
        budget_used=periods[key.budget_period].tokens if key.budget_period else None,
    )


def _added(uses: Iterable[KeyUse]) -> UseView:
    found = list(uses)
    return UseView(**{name: sum(getattr(use, name) for use in found) for name in UseView.model_fields})


def keys(state: State) -> tuple[KeyView, ...]:
    """Every API key that there has been, the newest last."""

    def view(fact: ApiKeyCreated) -> KeyView:
        ended = state.revoked.get(fact.id)
        return KeyView.model_validate(
            {
                **fact.model_dump(exclude={"secret_sha256", "by", "at"}),
                "created_at": fact.at,
                "created_by": fact.by,
                "revoked_at": ended.at if ended else None,
                "revoked_by": ended.by if ended else None,
                "why": ended.why if ended else None,
            }
        )

    return tuple(view(fact) for fact in state.keys.values())


def models(state: State) -> tuple[ModelView, ...]:
    """Every registered name."""
    splits: dict[str, dict[str, Split]] = {}
    for (name, alias), standing in state.standing.items():
        splits.setdefault(name, {})[alias] = standing[-1]
    return tuple(
        ModelView(
            name=name,
            kind=versions[-1].kind,
            base=versions[-1].base,
            versions=versions,
            stages=tuple(state.stages[version.id] for version in versions),
            aliases={alias: heaviest(split) for alias, split in splits.get(name, {}).items()},
            splits=splits.get(name, {}),
        )
        for name, versions in sorted(state.versions.items())
    )


def find(state: State, reference: str) -> Version:
    """The version that `name`, `name@alias` or `name/3` means; a name without a champion means its newest version."""
    name, slash, number = reference.partition("/")
    if slash and number.isdecimal() and len(number) <= _LONGEST_NUMBER:
        # Also one that is not served any more.
        return version_of(state, name, int(number))
    try:
        route = resolve(snapshot(state), reference)
        return version_of(state, route.name, route.version)
    except RequestError:
        if reference not in state.versions:
            raise
        return state.versions[reference][-1]


def version(
    state: State, reference: str, *, holdings: Sequence[Holding] = (), traffic: Sequence[Traffic] = ()
) -> VersionView:
    """All about the version that `reference` means (see `find`)."""
    found = find(state, reference)
    moves = [move for (name, _), moves in state.moves.items() if name == found.name for move in moves]
    event = state.entries.get(found.evaluation_id) if found.evaluation_id else None
    return VersionView(
        version=found,
        stage=state.stages[found.id],
        gate=state.verdict(found.id),
        pinned=state.pins.get(found.id),
        collected=found.id in state.collected,
        aliases=tuple(sorted(alias for alias, split in state.splits(found.name).items() if found.number in split)),
        moves=tuple(sorted((move for move in moves if found.number in move.split), key=lambda move: move.at)),
        evaluation=event.fact if event is not None and isinstance(event.fact, EvaluationFact) else None,
        run=run(state, found.run_id) if found.run_id else None,
        lineage=tuple(chain(state, found.id, holdings=holdings, traffic=traffic)),
    )


def run(state: State, run_id: str) -> RunView:
    """One run; `RequestError` (404) if there is none."""
    event = state.entries.get(run_id)
    if event is None or not isinstance(event.fact, RunFact):
        near = difflib.get_close_matches(run_id, [view.run.id for view in runs(state)], n=3, cutoff=0.5)
        raise RequestError(
            f"The registry knows no run {run_id!r}.",
            status=404,
            code="not_found",
            hint=f"Near it: {', '.join(near)}." if near else "`flywheel status` shows the last runs.",
        )
    return _run(state, event.fact, event.at, _below(state).get(run_id, []))


def runs(state: State) -> tuple[RunView, ...]:
    """Every run, the newest first."""
    below = _below(state)
    begun = [(event.fact, event.at) for event in state.entries.values() if isinstance(event.fact, RunFact)]
    return tuple(_run(state, fact, at, below.get(fact.id, [])) for fact, at in reversed(begun))


def _below(state: State) -> dict[str, list[CheckpointFact | RunIncident]]:
    found: dict[str, list[CheckpointFact | RunIncident]] = {}
    for event in state.entries.values():
        if isinstance(event.fact, CheckpointFact | RunIncident):
            found.setdefault(event.fact.run_id, []).append(event.fact)
    return found


def _run(state: State, fact: RunFact, begun_at: datetime, below: Iterable[CheckpointFact | RunIncident]) -> RunView:
    facts = tuple(below)
    checkpoints = [each for each in facts if isinstance(each, CheckpointFact)]
    incidents = [each for each in facts if isinstance(each, RunIncident)]
    return RunView(
        run=fact,
        status=state.run_status(fact.id),
        verdict=state.ended[fact.id].verdict if fact.id in state.ended else "",
        begun_at=begun_at,
        checkpoints=tuple(sorted(checkpoints, key=lambda checkpoint: checkpoint.step)),
        incidents=tuple(sorted(incidents, key=lambda incident: incident.at)),
    )


def needed_checkpoints(state: State, run_id: str) -> dict[int, str]:
    """The steps of a run whose checkpoints the registry needs, each with the reason.

    A version or an evaluation was made from them: so those of alias targets and of parents are among them. Not those
    of versions whose files have been freed.
    """
    why: dict[int, str] = {}
    for event in state.entries.values():
        fact = event.fact
        if not isinstance(fact, EvaluationFact | Version) or fact.checkpoint_id is None:
            continue
        made_from = state.entries.get(fact.checkpoint_id)
        if made_from is None or not isinstance(made_from.fact, CheckpointFact) or made_from.fact.run_id != run_id:
            continue
        if isinstance(fact, EvaluationFact):
            why.setdefault(made_from.fact.step, f"evaluation {fact.id} measured it")
        elif fact.id not in state.collected:
            why[made_from.fact.step] = f"version {fact.id} was made from it"
    return why


def history(state: State, name: str) -> tuple[HistoryEntry, ...]:
    """Everything that happened to `name`, oldest first; `RequestError` (404) if it is not registered."""
    if name not in state.versions:
        raise unknown(state, name)
    return tuple(entry for event in state.history[name] for entry in _happened(event, name))


def live_at(state: State, name: str, moment: datetime) -> tuple[LiveView, ...]:
    """What every alias of `name` stood at, at `moment`, and why.

    `RequestError` if the name is not registered or the moment has no time zone.
    """
    if name not in state.versions:
        raise unknown(state, name)
    if moment.tzinfo is None:
        raise RequestError(f"{moment} has no time zone.", param="at", hint="Write 2026-01-31T12:00Z.")
    return tuple(
        LiveView(alias=alias, split=move.split, move=move, gates=tuple(state.verdicts[gate] for gate in move.gates))
        for alias, move in sorted(state.moves_at(name, moment).items())
    )


def differences(first: Version, second: Version) -> tuple[Difference, ...]:
    """The facts in which two versions differ, by name."""
    ours, theirs = _flat(first.model_dump(mode="json")), _flat(second.model_dump(mode="json"))
    return tuple(
        Difference(fact=fact, first=ours.get(fact, "—"), second=theirs.get(fact, "—"))
        for fact in dict.fromkeys((*ours, *theirs))
        if ours.get(fact) != theirs.get(fact) and fact not in ("id", "number", "path", "source_path")
    )


def collection(
    items: Iterable[Item], kept: Mapping[str, str], *, dry_run: bool, left: Mapping[Path | str, str] | None = None
) -> Collection:
    """A plan, or what came of it."""
    return Collection(
        dry_run=dry_run,
        freed=tuple(
            Freed(
                what=f"{item.found.what} {', '.join(item.version_ids) or item.found.path.name}",
                path=item.found.where,
                size_bytes=item.found.size_bytes,
                why=item.why,
            )
            for item in items
        ),
        kept=dict(kept),
        left={str(path): why for path, why in (left or {}).items()},
    )


def _flat(value: object, prefix: str = "") -> dict[str, str]:
    if isinstance(value, dict):
        return {key: text for name, each in value.items() for key, text in _flat(each, f"{prefix}{name}.").items()}
    return {} if value in (None, "", []) else {prefix.removesuffix("."): str(value)}


def _happened(event: Event, name: str) -> list[HistoryEntry]:
    def entry(
        what: str,
        version_id: str | None,
        why: str = "",
        **more: object,
    ) -> HistoryEntry:
        number = int(version_id.rpartition("/")[2]) if version_id else None
        return HistoryEntry.model_validate(
            {"at": event.at, "by": event.by, "what": what, "version": number, "why": why, **more}
        )

    match event.fact:
        case Version() as fact:
            origin = f"imported: {fact.origin.version_id} of {fact.origin.exported_by}" if fact.origin else ""
            return [entry("registered", fact.id, origin)]
        case GateBegun() as fact:
            return [entry("gate begun", fact.version_id)]
        case GateEnded() as fact:
            return [entry(f"gate {fact.outcome}", fact.gate_id.partition("#")[0], fact.reason)]
        case AliasMove() as move:
            more = {"alias": move.alias, "split": move.split, "previous": move.previous, "forced": move.forced}
            return [entry(move.action, f"{name}/{move.version}", move.why, **more)]
        case ExternalMove() as fact:
            version_id = f"{name}/{fact.version}" if fact.version else None
            return [entry("external refused", version_id, f"in {fact.where}: {fact.refused}", alias=fact.alias)]
        case Retired() as fact:
            return [entry("retired", fact.version_id, fact.why)]
        case Pinned() as fact:
            return [entry("pinned" if fact.pinned else "unpinned", fact.version_id, fact.why)]
        case Collected() as fact:
            return [entry("files freed", id_) for id_ in fact.version_ids if id_.rpartition("/")[0] == name]
        case Restored() as fact:
            return [entry("files restored", fact.version_id)]
        case _:
            return []
