"""What may happen to the registry: `decide` says what a command adds to the log, or refuses it. Pure.

The moment is an argument, and an artifact has been stored before its `Register` arrives.

Every command may arrive twice, because a caller whose answer was lost asks again. The second time adds nothing and
gets the first answer:

    facts (data, run, checkpoint, incident, evaluation,   the same fact under the same id is known already
    feedback)
    Register, Adopt                                       the same content under the same name is the same version
    Promote, Rollback, BeginGate, Retire, RevokeKey       carry the caller's command id, which the fact keeps
    CreateKey                                             the same key under the same id
    EndGate, Pin                                          the same verdict, the same pin
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from math import isclose
from typing import Final, TypeVar

from actors.registry.apikeys import DIGEST, KEY_ID, ROLES, ApiKey
from actors.registry.config import ALIAS_PATTERN, NAME_PATTERN, RESERVED_ALIAS
from actors.registry.facts import (
    AliasMove,
    ApiKeyCreated,
    ApiKeyRevoked,
    Artifact,
    CheckpointFact,
    Collected,
    DataFact,
    Driver,
    EvaluationFact,
    Event,
    ExternalMove,
    Fact,
    FeedbackFact,
    GateBegun,
    GateEnded,
    Origin,
    Pinned,
    Restored,
    Retired,
    RunEnded,
    RunFact,
    RunIncident,
    Stage,
    Version,
    VersionFact,
    encode,
    portable,
)
from actors.registry.snapshot import Split, heaviest
from actors.registry.state import State, held, replay, unknown, version_of
from cluster.errors import RequestError, StateError

LEGAL: Final[Mapping[Stage, tuple[Stage, ...]]] = {
    "candidate": ("evaluating", "retired"),
    "evaluating": ("passed", "blocked"),
    "passed": ("evaluating", "promoted", "retired"),
    "blocked": ("evaluating", "retired"),
    "promoted": ("promoted", "retired"),
    "retired": (),
}
"""Where a version may go from each stage. A forced promotion may start from every stage but `retired`."""


@dataclass(frozen=True)
class Register:
    """Make the stored `artifact` a version. `origin`: it comes from another installation."""

    fact: VersionFact
    artifact: Artifact
    origin: Origin | None = None


@dataclass(frozen=True)
class Adopt:
    """Make a version of another installation one of ours, with the facts that it was made from (`lineage.origins`)."""

    origins: tuple[Fact, ...]
    register: Register


@dataclass(frozen=True)
class BeginGate:
    """Measure a version with a gate; another gate on it that is still open is abandoned."""

    version_id: str
    by: str
    command: str
    driver: Driver | None = None


@dataclass(frozen=True)
class Promote:
    """Move an alias to one version, or split its traffic over several.

    `expected`: where it must stand now (empty: it must not exist); None: wherever it stands. `force`: also without a
    passed gate. `external`: it has been moved in MLflow already.
    """

    name: str
    alias: str
    split: Split
    by: str
    why: str
    command: str
    expected: Split | None = None
    force: bool = False
    external: bool = False


@dataclass(frozen=True)
class Rollback:
    """Move an alias back to where it stood before its last promotion that has not been undone."""

    name: str
    alias: str
    by: str
    why: str
    command: str


@dataclass(frozen=True)
class Retire:
    """Take a version out of traffic for good."""

    version_id: str
    by: str
    why: str
    command: str


@dataclass(frozen=True)
class Pin:
    """Keep a version's files from garbage collection (`pinned`), or let go of them."""

    version_id: str
    pinned: bool
    by: str
    why: str


@dataclass(frozen=True)
class CreateKey:
    """Let an API key in; of its secret only the hash is here."""

    key: ApiKey
    by: str


@dataclass(frozen=True)
class RevokeKey:
    """Let an API key in no longer, for good."""

    key_id: str
    by: str
    why: str
    command: str


Recorded = DataFact | FeedbackFact | EvaluationFact | RunIncident
Command = (
    Recorded
    | RunFact
    | CheckpointFact
    | RunEnded
    | ExternalMove
    | Collected
    | Register
    | Adopt
    | BeginGate
    | GateEnded
    | Promote
    | Rollback
    | Retire
    | Pin
    | CreateKey
    | RevokeKey
)
_OF_ONE_START: Final = ("driver", "tracking_run", "changes")
"""What of a run may be other each time that it is taken up."""
AnyFact = TypeVar("AnyFact", bound=Recorded | RunFact | CheckpointFact)


@dataclass(frozen=True)
class Decision:
    """What a command adds to the log (nothing, if it was known already) and what its caller is told."""

    facts: tuple[Fact, ...]
    answer: Fact


def decide(state: State, command: Command, *, now: datetime) -> Decision:
    """What `command` adds to the log at `now`.

    Raises `RequestError` (404) for an unknown id and (400) for a value that cannot be, `StateError` for a move that
    the present state does not allow.
    """
    match command:
        case Register():
            return _register(state, command, now)
        case Adopt():
            return _adopt(state, command, now)
        case BeginGate():
            return _begin_gate(state, command, now)
        case GateEnded():
            return _end_gate(state, command)
        case Promote():
            return _promote(state, command, now)
        case Rollback():
            return _rollback(state, command, now)
        case Retire():
            return _retire(state, command, now)
        case Pin():
            return _pin(state, command, now)
        case CreateKey():
            return _create_key(state, command, now)
        case RevokeKey():
            return _revoke_key(state, command, now)
        case RunFact():
            return _begin(state, command)
        case RunEnded():
            return _end(state, command)
        case CheckpointFact():
            return _checkpoint(state, command)
        case Collected():
            return _collect(state, command)
        case ExternalMove():
            known = state.entries.get(command.id)
            return Decision((), known.fact) if known else Decision((command,), command)
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
    above = (fact.parent, fact.run_id, fact.checkpoint_id, fact.data_version, fact.evaluation_id)
    _require_known(state, {id_ for id_ in above if id_})


def _record(state: State, fact: Recorded) -> Decision:
    if (known := _known(state, fact)) is not None:
        if encode(known) != encode(fact):
            raise StateError(
                f"{fact.id!r} is recorded with other facts already; facts do not change.",
                hint="Give the new one its own id.",
            )
        return Decision((), known)
    above: tuple[str | None, ...]
    match fact:
        case DataFact():
            above = (fact.parent,)
        case FeedbackFact():
            above = fact.versions
        case RunIncident():
            _require_known(state, {fact.run_id}, RunFact)
            above = ()
        case EvaluationFact():
            above = (fact.run_id, fact.checkpoint_id, fact.data_version, fact.version_id)
    _require_known(state, {id_ for id_ in above if id_})
    return Decision((fact,), fact)


def _begin(state: State, run: RunFact) -> Decision:
    known = _known(state, run)
    if known is None:
        _require_known(state, {run.data_version} if run.data_version else set())
        return Decision((run,), run)
    before, after = known.model_dump(mode="json"), run.model_dump(mode="json")
    changed = [name for name in after if name not in _OF_ONE_START and before[name] != after[name]]
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
        if known.id in state.collected:
            return Decision((Restored(version_id=known.id, path=artifact.path),), known)
        return Decision((), known)
    number = len(state.versions.get(fact.name, ())) + 1
    version = Version(
        **{**dict(fact), **dict(artifact), "licence": fact.licence or artifact.licence},
        id=f"{fact.name}/{number}",
        number=number,
        origin=command.origin,
        created_at=now,
    )
    return Decision((version,), version)


def _adopt(state: State, command: Adopt, now: datetime) -> Decision:
    """Origins that are known here already must be the same; the rest comes in with the version, in one step."""
    fresh: list[Fact] = []
    for fact in command.origins:
        if not isinstance(fact, Recorded | RunFact | CheckpointFact | RunEnded):
            raise RequestError(f"A version is not made from {fact.event!r}; it cannot be imported.", param="origins")
        if isinstance(fact, RunEnded):
            before = state.ended.get(fact.run_id)
            # A run that goes on here is not ended from elsewhere.
            said = before is not None and before.presumed and not fact.presumed
            fresh += [fact] if said or fact.run_id not in state.entries else []
        elif (known := _known(state, fact)) is None:
            fresh.append(fact)
        elif encode(portable(known)) != encode(portable(fact)):
            raise StateError(
                f"{fact.id!r} is recorded here with other facts than in the import.",
                hint="Two installations have used one id for two things; the version cannot keep its lineage here.",
            )
    events = [Event(state.seq + place, now, "", fact) for place, fact in enumerate(fresh, start=1)]
    registered = _register(replay(events, state), command.register, now)
    return Decision((*fresh, *registered.facts) if registered.facts else (), registered.answer)


def _begin_gate(state: State, command: BeginGate, now: datetime) -> Decision:
    if (made := state.commands.get(command.command)) is not None:
        return Decision((), made)
    stage = _stage(state, command.version_id)
    facts: list[Fact] = []
    open_gate = state.open_gate(command.version_id)
    if open_gate is not None:
        facts.append(GateEnded(gate_id=open_gate.id, outcome="abandoned", reason=f"{command.by} began another gate"))
        if stage == "evaluating":  # it may have been promoted by force meanwhile
            stage = open_gate.was
    if "evaluating" not in LEGAL[stage]:
        raise _illegal(state, command.version_id, "be gated")
    begun = GateBegun(
        id=f"{command.version_id}#gate-{len(state.gates.get(command.version_id, ())) + 1}",
        version_id=command.version_id,
        was=stage,
        by=command.by,
        at=now,
        driver=command.driver,
        command=command.command,
    )
    return Decision((*facts, begun), begun)


def _end_gate(state: State, ended: GateEnded) -> Decision:
    _require_known(state, {ended.gate_id}, GateBegun)
    if ended.evaluation_id:
        _require_evidence(state, ended, ended.evaluation_id)
    before = state.verdicts.get(ended.gate_id)
    if before == ended or (before is not None and ended.outcome == "abandoned"):
        return Decision((), before)
    if before is not None:
        raise StateError(
            f"Gate {ended.gate_id} is over already: {before.outcome}{f' ({before.reason})' if before.reason else ''}.",
            hint="Begin a new gate; a verdict does not change.",
        )
    if ended.outcome == "passed" and not all(each.passed for each in ended.checks):
        failed = ", ".join(each.name for each in ended.checks if not each.passed)
        raise RequestError(f"A gate does not pass with a failed check: {failed}.", param="outcome")
    return Decision((ended,), ended)


def _require_evidence(state: State, ended: GateEnded, evaluation_id: str) -> None:
    _require_known(state, {evaluation_id}, EvaluationFact)
    evaluation = state.entries[evaluation_id].fact
    assert isinstance(evaluation, EvaluationFact)
    version_id = ended.gate_id.partition("#")[0]
    if evaluation.version_id not in (None, version_id):
        raise RequestError(
            f"{evaluation_id} measured {evaluation.version_id}, not {version_id}.",
            param="evaluation_id",
            hint="End the gate with its own evaluation.",
        )
    if ended.outcome == "passed" and not evaluation.passed:
        raise RequestError(
            f"{evaluation_id} was not passed, so neither is {ended.gate_id}.",
            param="outcome",
            hint="End the gate as blocked.",
        )


def _promote(state: State, command: Promote, now: datetime) -> Decision:
    if (made := state.commands.get(command.command)) is not None:
        return Decision((), made)
    _require_alias(command.alias)
    _require_reason(command.by, command.why)
    split = _split(command.split)
    versions = [version_of(state, command.name, number) for number in split]
    moves = state.moves.get((command.name, command.alias), ())
    current = state.split(command.name, command.alias) or {}
    # Before anything else: who expects one thing and finds another has to know, also where the move is made already.
    if command.expected is not None and _split(command.expected, empty=True) != current:
        raise StateError(
            f"{command.name}@{command.alias} stands at {shown(current)}, not at {shown(command.expected)}; "
            f"it was not moved to {shown(split)}.",
            hint="Somebody moved it meanwhile: look at its history, then decide again.",
        )
    if current == split:
        return Decision((), moves[-1])
    ungated = [version for version in versions if not _gated(state, version.id)]
    for version in versions:
        if version.id in state.collected or state.stages[version.id] == "retired":
            raise _illegal(state, version.id, "be promoted")
    if ungated and not command.force:
        raise _illegal(state, ungated[0].id, "be promoted")
    move = _move(state, command, split, now, action="external" if command.external else "promote", forced=bool(ungated))
    return Decision((move,), move)


def _gated(state: State, version_id: str) -> bool:
    """Whether the last verdict on a version is a pass, and it has not moved on: force is not inherited."""
    verdict = state.verdict(version_id)
    passed = verdict is not None and verdict.outcome == "passed"
    return passed and "promoted" in LEGAL[state.stages[version_id]]


def _rollback(state: State, command: Rollback, now: datetime) -> Decision:
    if (made := state.commands.get(command.command)) is not None:
        return Decision((), made)
    _require_reason(command.by, command.why)
    if command.name not in state.versions:
        raise unknown(state, command.name)
    standing = state.standing.get((command.name, command.alias), ())
    for split in (earlier for earlier in reversed(standing[:-1]) if earlier != standing[-1]):
        ids = {f"{command.name}/{number}" for number in split}
        if not ids & state.collected and all(state.stages[id_] != "retired" for id_ in ids):
            move = _move(state, command, split, now, action="rollback", forced=False)
            return Decision((move,), move)
    raise StateError(
        f"{command.name}@{command.alias} has no earlier version to go back to; it stands at "
        f"{shown(standing[-1] if standing else {})}.",
        hint=f"Promote a version by number; {command.name} has 1 to {len(state.versions[command.name])}.",
    )


def _move(
    state: State, command: Promote | Rollback, split: Split, now: datetime, *, action: str, forced: bool
) -> AliasMove:
    current = state.split(command.name, command.alias)
    verdicts = [state.verdict(f"{command.name}/{number}") for number in split]
    ordinal = len(state.moves.get((command.name, command.alias), ())) + 1
    return AliasMove.model_validate(
        {
            "id": f"{command.name}@{command.alias}#{ordinal}",
            "name": command.name,
            "alias": command.alias,
            "version": heaviest(split),
            "split": split,
            "previous": heaviest(current) if current else None,
            "previous_split": current or {},
            "by": command.by,
            "why": command.why,
            "at": now,
            "action": action,
            "forced": forced,
            "gates": [verdict.gate_id for verdict in verdicts if verdict],
            "command": command.command,
        }
    )


def _retire(state: State, command: Retire, now: datetime) -> Decision:
    if (made := state.commands.get(command.command)) is not None:
        return Decision((), made)
    _require_reason(command.by, command.why)
    stage = _stage(state, command.version_id)
    known = state.entries.get(f"{command.version_id}#retired")
    if known is not None:
        return Decision((), known.fact)
    name, _, number = command.version_id.rpartition("/")
    held = [alias for alias, split in state.splits(name).items() if int(number) in split]
    if held:
        raise StateError(
            f"{command.version_id} has the alias {', '.join(sorted(held))}; it cannot be retired.",
            hint=f"Move the alias first: flywheel models promote {name} NUMBER --alias {held[0]} --reason …",
        )
    if "retired" not in LEGAL[stage]:
        raise _illegal(state, command.version_id, "be retired")
    retired = Retired(
        id=f"{command.version_id}#retired",
        version_id=command.version_id,
        by=command.by,
        why=command.why,
        at=now,
        command=command.command,
    )
    return Decision((retired,), retired)


def _pin(state: State, command: Pin, now: datetime) -> Decision:
    _require_reason(command.by, command.why)
    _stage(state, command.version_id)
    pinned = Pinned(version_id=command.version_id, pinned=command.pinned, by=command.by, why=command.why, at=now)
    if command.pinned and command.version_id in state.collected:
        raise StateError(
            f"The files of {command.version_id} have been freed already.", hint="Register the content again."
        )
    before = state.pins.get(command.version_id)
    if (before is not None) == command.pinned:
        return Decision((), before or pinned)
    return Decision((pinned,), pinned)


def _collect(state: State, fact: Collected) -> Decision:
    keep = held(state)
    for version_id in fact.version_ids:
        _stage(state, version_id)
        if version_id in keep:
            raise StateError(f"The files of {version_id} stay: {keep[version_id]}.", hint="Plan the collection again.")
    fresh = tuple(id_ for id_ in fact.version_ids if id_ not in state.collected)
    return Decision((Collected(version_ids=fresh),) if fresh else (), fact)


def _create_key(state: State, command: CreateKey, now: datetime) -> Decision:
    key = command.key
    if (known := state.keys.get(key.id)) is not None:
        created = ApiKeyCreated(**vars(key), by=known.by, at=known.at)
        if encode(created) != encode(known):
            raise StateError(
                f"{key.id!r} is the id of another API key already ({known.name}).",
                hint="Create the key again; it gets a new id and a new secret.",
            )
        return Decision((), known)
    _require_sound(key, now)
    for other in state.live_keys.values():
        # Usage and logs speak of keys by name. To change a secret without a gap, create the next under a new name.
        if other.name == key.name and not other.expired(now):
            raise StateError(
                f"There is a live API key called {key.name!r} already: {other.id}.",
                hint=f"Choose another name, or revoke it first: flywheel keys revoke {other.id} --reason …",
            )
    created = ApiKeyCreated(**vars(key), by=command.by, at=now)
    return Decision((created,), created)


def _revoke_key(state: State, command: RevokeKey, now: datetime) -> Decision:
    if (made := state.commands.get(command.command)) is not None:
        return Decision((), made)
    _require_reason(command.by, command.why)
    known = state.keys.get(command.key_id)
    if known is None:
        raise RequestError(
            f"There is no API key {command.key_id!r}.",
            status=404,
            code="not_found",
            hint="`flywheel keys list` shows the ids.",
        )
    before = state.revoked.get(command.key_id)
    if before is not None:
        raise StateError(
            f"{known.id} ({known.name}) was revoked already, at {before.at:%Y-%m-%d %H:%M} UTC by {before.by}: "
            f"{before.why}",
            hint="Nothing is left to do; no gateway lets it in.",
        )
    revoked = ApiKeyRevoked(key_id=known.id, by=command.by, why=command.why, at=now, command=command.command)
    return Decision((revoked,), revoked)


def _require_sound(key: ApiKey, now: datetime) -> None:
    _require_name(key.name, "name")
    if not KEY_ID.fullmatch(key.id) or not DIGEST.fullmatch(key.secret_sha256):
        raise RequestError(
            f"{key.id!r} cannot be an API key.", param="id", hint="Make its secret with `flywheel keys create`."
        )
    foreign = sorted({*key.roles} - {*ROLES})
    if not key.roles or foreign:
        raise RequestError(
            f"An API key cannot have the roles {foreign or 'none'}.", param="roles", hint=f"Roles: {', '.join(ROLES)}."
        )
    if not key.models or not all(pattern and pattern.isprintable() for pattern in key.models):
        raise RequestError(
            f"{list(key.models)!r} cannot be the models of an API key.",
            param="models",
            hint="Give patterns such as 'base:team-*'; '*' is every model.",
        )
    for param in ("rpm", "tpm", "budget_tokens"):
        if (value := getattr(key, param)) is not None and value < 1:
            raise RequestError(f"{param} is at least 1, not {value}.", param=param, hint="Leave it out for no limit.")
    if (key.budget_tokens is None) != (key.budget_period is None):
        raise RequestError(
            f"A budget is so many tokens per day or month; {key.budget_tokens} per {key.budget_period} is none.",
            param="budget_tokens",
            hint="Give --budget-tokens and --per, or neither.",
        )
    if key.expires_at is not None and key.expires_at.tzinfo is None:
        raise RequestError(f"{key.expires_at} has no time zone.", param="expires_at", hint="Give it one.")
    if key.expired(now):
        raise RequestError(
            f"An API key that expires at {key.expires_at} would never open anything.",
            param="expires_at",
            hint="Give a moment that is still to come.",
        )


def shown(split: Split) -> str:
    """Where an alias stands, in words."""
    if not split:
        return "no version"
    if len(split) == 1:
        return f"version {next(iter(split))}"
    return "versions " + ", ".join(f"{number} ({share:.0%})" for number, share in sorted(split.items()))


def _split(split: Split, *, empty: bool = False) -> Split:
    """The split in its one form: sorted, nothing without a share, shares that add up to 1."""
    if empty and not split:
        return {}
    if not split or any(not 0 < share <= 1 for share in split.values()) or not isclose(sum(split.values()), 1):
        raise RequestError(
            f"Shares of traffic are above 0 and add up to 1; {split} do not.",
            param="split",
            hint="Write the shares of all versions, for example 3=0.9,4=0.1.",
        )
    return dict(sorted(split.items()))


def _stage(state: State, version_id: str) -> Stage:
    if version_id not in state.stages:
        raise unknown(state, version_id)
    return state.stages[version_id]


def _illegal(state: State, version_id: str, what: str) -> StateError:
    stage = state.stages[version_id]
    if version_id in state.collected:
        return StateError(f"{version_id} cannot {what}: its files have been freed.", hint="Register the content again.")
    legal = LEGAL[stage]
    why = ""
    if stage == "blocked" and (verdict := state.verdict(version_id)) is not None:
        failed = [f"{each.name}: {each.reason}" for each in verdict.checks if not each.passed]
        why = f" ({'; '.join(failed) or verdict.reason})"
    if stage == "promoted" and what == "be promoted":
        why = " by force, without a passed gate" + why
    ways = f"From there it can become {' or '.join(legal)}." if legal else "Nothing leads out of there."
    gate = f" Pass a gate (`flywheel evaluate RECIPE --version {version_id}`), or use --force with a --reason."
    return StateError(
        f"{version_id} is {stage}{why}; it cannot {what}.",
        hint=ways + (gate if what == "be promoted" and stage != "retired" else ""),
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
    if not ALIAS_PATTERN.fullmatch(alias):
        raise RequestError(
            f"{alias!r} cannot be an alias.",
            param="alias",
            hint="Use 1 to 63 lower-case letters, digits, '_' or '-', starting with a letter or digit.",
        )
    if RESERVED_ALIAS.fullmatch(alias):
        raise RequestError(
            f"The alias {alias!r} is reserved.", param="alias", hint="Choose a role: champion, canary, …"
        )


def _require_reason(by: str, why: str) -> None:
    for param, value in (("by", by), ("why", why)):
        if not value.strip():
            raise RequestError(
                f"This needs a {param!r}.",
                param=param,
                hint="History is kept for ever; say it.",
            )
        if not all(char.isprintable() or char in "\n\t" for char in value):
            raise RequestError(
                f"{param!r} holds a character that cannot be shown: {value!r}.",
                param=param,
                hint="Leave control characters out: history is shown on terminals.",
            )
