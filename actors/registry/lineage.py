"""Where something comes from and what came of it: a walk over the facts' parents.

Pure; it reads a `State` and knows neither Ray nor SQL.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final

from actors.registry.snapshot import resolve
from actors.registry.state import (
    AliasMove,
    CheckpointFact,
    DataFact,
    EvaluationFact,
    Event,
    Fact,
    RunFact,
    State,
    Version,
    snapshot,
    unknown,
)
from cluster.config import Config
from cluster.errors import RequestError

_ORDER: Final = ("data", "run", "checkpoint", "evaluation", "version", "alias")


class Link(Config):
    """One element of a chain. `kind` is data, run, checkpoint, evaluation, version or alias."""

    id: str
    kind: str
    parents: tuple[str, ...]
    at: datetime
    by: str
    note: str
    """One line for a person."""


def chain(state: State, reference: str) -> list[Link]:
    """Everything that `reference` was made from and everything that was made from it, in the order of the loop.

    `reference` is the id of any fact, or a model's `name`, `name@alias` or `name/version`.
    Siblings are not in it: two runs on the same data do not appear in each other's chain.
    Raises `RequestError` (404) with the nearest ids.
    """
    start = _start(state, reference)
    parents = {id_: _parents(event.fact) for id_, event in state.entries.items()}
    children: dict[str, list[str]] = {}
    for id_, above in parents.items():
        for parent in above:
            children.setdefault(parent, []).append(id_)
    found = _reach(start, parents) | _reach(start, children)
    events = sorted((state.entries[id_] for id_ in found), key=_place)
    return [
        Link(
            id=_id(e.fact),
            kind=e.fact.event,
            parents=_parents(e.fact),
            at=e.at,
            by=e.by,
            note=_note(state, e.fact),
        )
        for e in events
    ]


def _start(state: State, reference: str) -> str:
    if reference in state.entries:
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


def _place(event: Event) -> tuple[int, int]:
    return _ORDER.index(event.fact.event), event.seq


def _id(fact: Fact) -> str:
    assert isinstance(fact, DataFact | RunFact | CheckpointFact | EvaluationFact | Version | AliasMove)
    return fact.id


def _parents(fact: Fact) -> tuple[str, ...]:
    """Ids that a fact was made from, nearest first."""
    above: tuple[str | None, ...]
    match fact:
        case DataFact():
            above = (fact.parent,)
        case RunFact():
            above = (fact.data_version,)
        case CheckpointFact():
            above = (fact.run_id,)
        case EvaluationFact():
            above = (fact.checkpoint_id, fact.run_id, fact.data_version)
        case Version():
            above = (fact.evaluation_id, fact.checkpoint_id, fact.run_id, fact.data_version)
        case AliasMove():
            above = (f"{fact.name}/{fact.version}",)
        case _:
            above = ()
    return tuple(id_ for id_ in above if id_)


def _note(state: State, fact: Fact) -> str:
    match fact:
        case DataFact():
            return f"{fact.stage}, {', '.join(f'{rows} {split}' for split, rows in fact.rows.items())}"
        case RunFact():
            return f"{state.run_status(fact.id)}, from {fact.base}"
        case CheckpointFact():
            return f"step {fact.step}"
        case EvaluationFact():
            return "gate passed" if fact.passed else "gate not passed"
        case Version():
            return f"{fact.kind} of {fact.base}, {fact.digest[:12]}"
        case AliasMove():
            return f"{fact.alias} → {fact.version}: {fact.why}"
        case _:
            return ""
