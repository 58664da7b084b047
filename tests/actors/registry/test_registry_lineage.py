from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from actors.registry import views
from actors.registry.facts import (
    Artifact,
    CheckpointFact,
    DataFact,
    EvaluationFact,
    Event,
    FeedbackFact,
    GateEnded,
    RunEnded,
    RunFact,
    VersionFact,
)
from actors.registry.ledger import Ledger
from actors.registry.lineage import Branch, chain, graph, tree
from actors.registry.rules import BeginGate, Promote, Register
from actors.registry.serving import Holding, Traffic
from actors.registry.state import State
from actors.registry.store import Log, MemoryEventStore
from cluster.errors import RequestError

TURN = [
    "errors@1",
    "errors@2",
    "triage-1",
    "triage-1/step-9",
    "eval-1",
    "triage/1",
    "triage/1#gate-1",
    "triage@champion#1",
]


@pytest.fixture
def state() -> State:
    """One whole turn of the wheel, and a second run on the same data that came to nothing."""
    ledger = Ledger(MemoryEventStore(), clock=lambda: datetime(2026, 1, 1, tzinfo=UTC))
    for fact in (
        DataFact(id="errors@1", name="errors", digest="d1", stage="examples", rows={"train": 8}),
        DataFact(id="errors@2", name="errors", digest="d2", stage="tokens", parent="errors@1"),
        RunFact(id="triage-1", name="triage", base="smol", base_digest="b", data_version="errors@2"),
        RunFact(id="triage-2", name="triage", base="smol", base_digest="b", data_version="errors@2"),
        CheckpointFact(id="triage-1/step-5", run_id="triage-1", step=5, path=Path("/r5")),
        CheckpointFact(id="triage-1/step-9", run_id="triage-1", step=9, path=Path("/r9")),
        CheckpointFact(id="triage-2/step-5", run_id="triage-2", step=5, path=Path("/r5")),
        EvaluationFact(id="eval-1", run_id="triage-1", checkpoint_id="triage-1/step-9", passed=True),
        RunEnded(run_id="triage-2", status="failed", verdict="rank 0 ran out of memory"),
    ):
        ledger.commit(fact, by="ada")
    fact_ = VersionFact(
        name="triage",
        kind="adapter",
        source_path=Path("/r9"),
        base="smol",
        run_id="triage-1",
        checkpoint_id="triage-1/step-9",
        data_version="errors@2",
        evaluation_id="eval-1",
    )
    ledger.commit(Register(fact_, Artifact(path=Path("/v"), digest="aa")), by="ada")
    ledger.commit(BeginGate("triage/1", "ada", "g1"), by="ada")
    ledger.commit(
        GateEnded(gate_id="triage/1#gate-1", outcome="passed", evaluation_id="eval-1", reason="+0.5"), by="ada"
    )
    ledger.commit(Promote("triage", "champion", {1: 1.0}, "ada", "beats base", "c1"), by="ada")
    return ledger.state


@pytest.mark.parametrize(
    "start", ["triage/1", "triage", "triage@champion", "triage@champion#1", "eval-1", "triage-1/step-9"]
)
def test_the_chain_of_a_version_is_its_turn_of_the_wheel_from_any_start(state: State, start: str) -> None:
    links = chain(state, start)
    assert [link.id for link in links] == TURN
    assert [link.kind for link in links] == [
        "data", "data", "run", "checkpoint", "evaluation", "version", "gate", "alias",
    ]  # fmt: skip


def test_every_link_but_the_first_hangs_on_an_earlier_one(state: State) -> None:
    seen: set[str] = set()
    for link in chain(state, "triage/1"):
        assert set(link.parents) <= seen
        assert link.parents or not seen
        seen.add(link.id)


def test_data_leads_to_everything_made_from_it_and_a_run_only_to_its_own(state: State) -> None:
    from_data = {link.id for link in chain(state, "errors@1")}
    assert from_data == set(state.entries)
    from_run = [link.id for link in chain(state, "triage-2")]
    assert from_run == ["errors@1", "errors@2", "triage-2", "triage-2/step-5"]


def test_an_unknown_start_comes_with_near_ids(state: State) -> None:
    with pytest.raises(RequestError) as caught:
        chain(state, "triage-3")
    assert caught.value.status == 404
    assert "triage-1" in str(caught.value.hint)


def test_the_views_tell_the_same_story(state: State) -> None:
    shown = views.version(state, "triage")
    assert shown.aliases == ("champion",)
    assert shown.run is not None
    assert [checkpoint.step for checkpoint in shown.run.checkpoints] == [5, 9]
    assert shown.evaluation is not None
    assert shown.evaluation.passed
    failed = views.run(state, "triage-2")
    assert (failed.status, failed.verdict) == ("failed", "rank 0 ran out of memory")
    assert [view.run.id for view in views.runs(state)] == ["triage-2", "triage-1"]
    assert [(entry.what, entry.version, entry.why) for entry in views.history(state, "triage")] == [
        ("registered", 1, ""),
        ("gate begun", 1, ""),
        ("gate passed", 1, "+0.5"),
        ("promote", 1, "beats base"),
    ]
    (model,) = views.models(state)
    assert (model.name, model.aliases, [version.id for version in model.versions]) == (
        "triage",
        {"champion": 1},
        ["triage/1"],
    )


def test_what_was_live_comes_with_who_moved_it_why_and_the_gates_word(state: State) -> None:
    with pytest.raises(RequestError, match="time zone"):
        views.live_at(state, "triage", datetime(2026, 1, 1))
    (live,) = views.live_at(state, "triage", datetime(2026, 1, 1, tzinfo=UTC))
    assert (live.alias, live.split, live.move.by, live.move.why) == ("champion", {1: 1.0}, "ada", "beats base")
    assert [(gate.outcome, gate.reason) for gate in live.gates] == [("passed", "+0.5")]
    assert views.live_at(state, "triage", datetime(2025, 1, 1, tzinfo=UTC)) == ()


MORNING = datetime(2026, 1, 2, 9, tzinfo=UTC)
HOLDINGS = [
    Holding(replica="llm#a", version_id="triage/1", node="n1", since=MORNING, seen=MORNING),
    Holding(replica="llm#a", version_id="unheard/1", node="n1", since=MORNING, seen=MORNING),
]
TRAFFIC = [
    Traffic(version_id="triage/1", hour=MORNING, requests=5),
    Traffic(version_id="triage/1", hour=MORNING.replace(hour=11), requests=7),
    Traffic(version_id="smol", hour=MORNING, requests=9),
]


@pytest.fixture
def served(state: State) -> State:
    """The same, with a feedback set on that day's answers and the data version that was made from it."""
    ledger = Ledger(MemoryEventStore(Log([*_events(state)])), clock=lambda: MORNING)
    ledger.commit(
        FeedbackFact(
            id="likes@1",
            digest="d",
            versions=("triage/1",),
            rows=3,
            since=MORNING,
            until=MORNING.replace(hour=12),
        ),
        by="ada",
    )
    ledger.commit(DataFact(id="errors@3", name="errors", digest="d3", stage="examples", parent="likes@1"), by="ada")
    return ledger.state


def _events(state: State) -> list[Event]:
    found = [*state.entries.values(), *state.history["triage"]]
    ended = [Event(0, MORNING, "t", each) for each in state.ended.values()]
    unique = {id(event.fact): event for event in (*found, *ended)}
    return [Event(place, e.at, e.by, e.fact) for place, e in enumerate(unique.values(), start=1)]


@pytest.mark.parametrize("start", ["triage/1", "errors@1", "replica/llm#a", "traffic/triage/1/2026-01-02", "likes@1"])
def test_the_chain_goes_on_to_replicas_traffic_feedback_and_the_next_data(served: State, start: str) -> None:
    found = {link.id: link for link in chain(served, start, holdings=HOLDINGS, traffic=TRAFFIC)}
    assert {"errors@1", "triage-1", "eval-1", "triage/1", start} <= found.keys()
    whole = {link.id: link for link in chain(served, "triage/1", holdings=HOLDINGS, traffic=TRAFFIC)}
    assert {"replica/llm#a", "traffic/triage/1/2026-01-02", "likes@1", "errors@3"} <= whole.keys()
    assert whole["likes@1"].parents[0] == "traffic/triage/1/2026-01-02"
    assert whole["traffic/triage/1/2026-01-02"].note.count("requests") == 2


def test_the_graph_has_an_edge_for_every_parent_and_the_tree_every_link_once(served: State) -> None:
    links = chain(served, "triage/1", holdings=HOLDINGS, traffic=TRAFFIC)
    drawn = graph(links)
    assert ["errors@1", "errors@2"] in drawn["edges"]  # type: ignore[operator]

    def walk(branches: Iterable[Branch]) -> list[str]:
        return [id_ for branch in branches for id_ in (branch.link.id, *walk(branch.branches))]

    assert sorted(walk(tree(links))) == sorted(link.id for link in links)
