from datetime import UTC, datetime
from pathlib import Path

import pytest

from actors.registry import views
from actors.registry.ledger import Ledger
from actors.registry.lineage import chain
from actors.registry.state import (
    Artifact,
    CheckpointFact,
    DataFact,
    EvaluationFact,
    Promote,
    Register,
    RunEnded,
    RunFact,
    State,
    VersionFact,
)
from actors.registry.store import MemoryEventStore
from cluster.errors import RequestError

TURN = ["errors@1", "errors@2", "triage-1", "triage-1/step-9", "eval-1", "triage/1", "triage@champion#1"]


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
    ledger.commit(Promote("triage", "champion", 1, "ada", "beats base", "c1"), by="ada")
    return ledger.state


@pytest.mark.parametrize(
    "start", ["triage/1", "triage", "triage@champion", "triage@champion#1", "eval-1", "triage-1/step-9"]
)
def test_the_chain_of_a_version_is_its_turn_of_the_wheel_from_any_start(state: State, start: str) -> None:
    links = chain(state, start)
    assert [link.id for link in links] == TURN
    assert [link.kind for link in links] == ["data", "data", "run", "checkpoint", "evaluation", "version", "alias"]


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
        ("promote", 1, "beats base"),
    ]
    (model,) = views.models(state)
    assert (model.name, model.aliases, [version.id for version in model.versions]) == (
        "triage",
        {"champion": 1},
        ["triage/1"],
    )


def test_a_moment_needs_a_time_zone(state: State) -> None:
    with pytest.raises(RequestError, match="time zone"):
        views.aliases_at(state, "triage", datetime(2026, 1, 1))
    assert views.aliases_at(state, "triage", datetime(2026, 1, 1, tzinfo=UTC)) == {"champion": 1}
