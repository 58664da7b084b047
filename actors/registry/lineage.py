"""Where something comes from and what came of it: a walk over the facts' parents, from data to traffic and back.

Pure; it reads a `State` and what servers have reported, and knows neither Ray nor SQL.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from actors.registry.facts import (
    AliasMove,
    CheckpointFact,
    DataFact,
    EvaluationFact,
    Event,
    ExternalMove,
    Fact,
    FeedbackFact,
    GateBegun,
    Retired,
    RunEnded,
    RunFact,
    RunIncident,
    Version,
    portable,
)
from actors.registry.rules import shown
from actors.registry.serving import Holding, Traffic
from actors.registry.snapshot import resolve
from actors.registry.state import State, snapshot, unknown
from cluster.config import Config
from cluster.errors import RequestError

_ORDER: Final = (
    "data",
    "run",
    "run-incident",
    "checkpoint",
    "evaluation",
    "version",
    "gate",
    "alias",
    "external-move",
    "retired",
    "replica",
    "traffic",
    "feedback",
)


class Link(Config):
    """One element of a chain. `kind` is one of data, run, run-incident, checkpoint, evaluation, version, gate, alias,
    external-move, retired, replica, traffic and feedback."""

    id: str
    kind: str
    parents: tuple[str, ...]
    """Ids that it was made from, nearest first."""
    at: datetime
    by: str
    note: str
    """One line for a person."""


@dataclass(frozen=True)
class Branch:
    """A link and what was made from it; a link with several parents hangs under the nearest."""

    link: Link
    branches: tuple["Branch", ...]


def chain(
    state: State, reference: str, *, holdings: Sequence[Holding] = (), traffic: Sequence[Traffic] = ()
) -> list[Link]:
    """Everything that `reference` was made from and everything that was made from it, in the order of the loop.

    `reference` is the id of any link, or a model's `name`, `name@alias` or `name/version`.
    Siblings are not in it: two runs on the same data do not appear in each other's chain.
    Raises `RequestError` (404) with the nearest ids.
    """
    reports = _reports(state, holdings, traffic)
    parents = {id_: _parents(state, event.fact) for id_, event in state.entries.items()}
    parents |= {id_: link.parents for id_, link in reports.items()}
    parents |= _judged(state, reports)
    start = _start(state, parents, reference)
    children: dict[str, list[str]] = defaultdict(list)
    for id_, above in parents.items():
        for parent in above:
            children[parent].append(id_)
    found = (_reach(start, parents) | _reach(start, children)) & parents.keys()
    return sorted((reports.get(id_) or _link(state, id_, parents[id_]) for id_ in found), key=_place)


def origins(state: State, version_id: str) -> list[Event]:
    """The events of everything that a version was made from, and of itself, as another installation can take them.

    What would mean something else there is taken out: ids of versions, drivers. A run that goes on is said to have
    stopped.
    """
    parents = {id_: _parents(state, event.fact) for id_, event in state.entries.items()}
    found: list[Event] = []
    for id_ in _reach(version_id, parents):
        event = state.entries.get(id_)
        match event.fact if event else None:
            case DataFact() | FeedbackFact() | CheckpointFact() | EvaluationFact() as fact:
                facts: list[Fact] = [portable(fact)]
            case RunFact() as fact:
                ended = state.ended.get(fact.id) or RunEnded(
                    run_id=fact.id, status="stopped", verdict="It went on when it was exported.", presumed=True
                )
                facts = [portable(fact), ended]
            case Version() as fact if fact.id == version_id:
                facts = [fact]
            case _:
                facts = []
        if event is not None:
            found += [replace(event, fact=each) for each in facts]
    return sorted(found, key=lambda event: event.seq)


def graph(links: Sequence[Link]) -> dict[str, object]:
    """The chain as nodes and edges (from what was there first to what was made from it)."""
    ids = {link.id for link in links}
    edges = [[parent, link.id] for link in links for parent in link.parents if parent in ids]
    return {"nodes": [link.model_dump(mode="json") for link in links], "edges": edges}


def tree(links: Sequence[Link]) -> list[Branch]:
    """The chain as trees, each from what has no parent in it."""
    ids = {link.id for link in links}
    under: dict[str | None, list[Link]] = defaultdict(list)
    for link in links:
        under[next((parent for parent in link.parents if parent in ids), None)].append(link)

    def branch(link: Link) -> Branch:
        return Branch(link, tuple(branch(each) for each in under[link.id]))

    return [branch(root) for root in under[None]]


def _link(state: State, id_: str, parents: tuple[str, ...]) -> Link:
    event = state.entries[id_]
    kind = "gate" if isinstance(event.fact, GateBegun) else event.fact.event
    return Link(id=id_, kind=kind, parents=parents, at=event.at, by=event.by, note=_note(state, event.fact))


def _reports(state: State, holdings: Sequence[Holding], traffic: Sequence[Traffic]) -> dict[str, Link]:
    """Replicas and days of traffic; one that held a version twice, or a day of many hours, is one link."""
    links: dict[str, Link] = {}
    for link in (*map(_replica, holdings), *map(_traffic, traffic)):
        if link.parents[0] not in state.stages:
            continue
        known = links.get(link.id)
        if known is not None:
            link = known.model_copy(
                update={
                    "parents": tuple(dict.fromkeys((*known.parents, *link.parents))),
                    "note": f"{known.note}; {link.note}",
                }
            )
        links[link.id] = link
    return links


def _replica(held: Holding) -> Link:
    until = f"until {held.until:%Y-%m-%d %H:%M:%S}" if held.until else "still"
    return Link(
        id=f"replica/{held.replica}",
        kind="replica",
        parents=(held.version_id,),
        at=held.since,
        by=held.node,
        note=f"{held.version_id} since {held.since:%Y-%m-%d %H:%M:%S}, {until}",
    )


def _traffic(row: Traffic) -> Link:
    return Link(
        id=_traffic_id(row.version_id, row.day.isoformat()),
        kind="traffic",
        parents=(row.version_id,),
        at=row.hour,
        by="gateway",
        note=f"{row.hour:%H}:00 {row.requests} requests, {row.failures} failed, "
        f"{row.prompt_tokens} + {row.completion_tokens} tokens",
    )


def _traffic_id(version_id: str, day: str) -> str:
    return f"traffic/{version_id}/{day}"


def _judged(state: State, reports: Mapping[str, Link]) -> dict[str, tuple[str, ...]]:
    """Parents of feedback sets: the traffic that they judge, as far as that is known, then its versions."""
    found: dict[str, tuple[str, ...]] = {}
    for event in state.entries.values():
        fact = event.fact
        if isinstance(fact, FeedbackFact):
            first, last = fact.since.date().isoformat(), fact.until.date().isoformat()
            days = [
                id_
                for id_, link in reports.items()
                if link.kind == "traffic" and link.parents[0] in fact.versions and first <= id_[-10:] <= last
            ]
            found[fact.id] = (*days, *fact.versions)
    return found


def _start(state: State, known: Collection[str], reference: str) -> str:
    if reference in known:
        return reference
    try:
        return resolve(snapshot(state), reference).id
    except RequestError:
        if reference in state.versions:
            return state.versions[reference][-1].id
        raise unknown(state, reference) from None


def _reach(start: str, edges: Mapping[str, Iterable[str]]) -> set[str]:
    found, front = {start}, [start]
    while front:
        for next_ in edges.get(front.pop(), ()):
            if next_ not in found:
                found.add(next_)
                front.append(next_)
    return found


def _place(link: Link) -> tuple[int, datetime, str]:
    return _ORDER.index(link.kind), link.at, link.id


def _parents(state: State, fact: Fact) -> tuple[str, ...]:
    """Ids that a fact was made from, nearest first."""
    above: tuple[str | None, ...]
    match fact:
        case DataFact():
            above = (fact.parent,)
        case RunFact():
            above = (fact.data_version, fact.base if fact.base in state.stages else None)
        case CheckpointFact() | RunIncident():
            above = (fact.run_id,)
        case EvaluationFact():
            above = (fact.version_id, fact.checkpoint_id, fact.run_id, fact.data_version)
        case Version():
            above = (fact.evaluation_id, fact.checkpoint_id, fact.run_id, fact.data_version, fact.parent)
        case GateBegun():
            verdict = state.verdicts.get(fact.id)
            above = (fact.version_id, verdict.evaluation_id if verdict else None)
        case AliasMove():
            above = (*fact.gates, *(f"{fact.name}/{number}" for number in fact.split))
        case ExternalMove():
            above = (f"{fact.name}/{fact.version}",) if fact.version else ()
        case Retired():
            above = (fact.version_id,)
        case FeedbackFact():
            above = fact.versions
        case _:
            above = ()
    return tuple(id_ for id_ in above if id_)


def _note(state: State, fact: Fact) -> str:
    match fact:
        case DataFact():
            return f"{fact.stage}, {', '.join(f'{rows} {split}' for split, rows in fact.rows.items())}"
        case RunFact():
            return f"{state.run_status(fact.id)}, from {fact.base}"
        case RunIncident():
            return fact.verdict
        case CheckpointFact():
            return f"step {fact.step}"
        case EvaluationFact():
            return "gate passed" if fact.passed else "gate not passed"
        case Version():
            return f"{fact.kind} of {fact.base}, {fact.digest[:12]}, {state.stages[fact.id]}"
        case GateBegun():
            verdict = state.verdicts.get(fact.id)
            return f"{verdict.outcome}: {verdict.reason}" if verdict else "goes on"
        case AliasMove():
            return f"{fact.alias} → {shown(fact.split)}{' by force' if fact.forced else ''}: {fact.why}"
        case ExternalMove():
            return f"{fact.alias} in {fact.where} was put back: {fact.refused}"
        case Retired():
            return fact.why
        case FeedbackFact():
            return f"{fact.rows} judged answers"
        case _:
            return ""
