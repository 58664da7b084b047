from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from actors.registry.state import (
    AliasMove,
    Artifact,
    CheckpointFact,
    Command,
    DataFact,
    Driver,
    EvaluationFact,
    Event,
    Fact,
    Promote,
    Register,
    Rollback,
    RunEnded,
    RunFact,
    State,
    Version,
    VersionFact,
    apply,
    check,
    decide,
    decode,
    encode,
    replay,
)
from cluster.errors import RequestError, StateError

START = datetime(2026, 1, 1, tzinfo=UTC)


class Machine:
    """The pure machine with a clock that ticks a minute per command, and its log."""

    def __init__(self) -> None:
        self.state = State()
        self.log: list[Event] = []
        self.now = START

    def do(self, command: Command) -> Fact:
        self.now += timedelta(minutes=1)
        decision = decide(self.state, command, now=self.now)
        for fact in decision.facts:
            self.log.append(Event(self.state.seq + 1, self.now, "tester", fact))
            self.state = apply(self.state, self.log[-1])
        return decision.answer


def register(content: str, *, name: str = "triage", **facts: object) -> Register:
    fact = VersionFact(name=name, kind="adapter", source_path=Path("/runs/x"), base="smol", **facts)  # type: ignore[arg-type]
    return Register(fact, Artifact(path=Path("/versions") / name / content, digest=content))


def promote(version: int, command: str, *, expected: int | None = None, alias: str = "champion") -> Promote:
    return Promote("triage", alias, version, "ada", "it beats the base", command, expected)


@pytest.fixture
def machine() -> Machine:
    """A run with a checkpoint, and three versions of `triage`."""
    machine = Machine()
    machine.do(DataFact(id="errors@1", name="errors", digest="d1", stage="examples", rows={"train": 8, "test": 2}))
    machine.do(DataFact(id="errors@2", name="errors", digest="d2", stage="tokens", parent="errors@1"))
    machine.do(RunFact(id="triage-1", name="triage", base="smol", base_digest="b", data_version="errors@2"))
    machine.do(CheckpointFact(id="triage-1/step-5", run_id="triage-1", step=5, path=Path("/runs/x")))
    for content in ("aa", "bb", "cc"):
        machine.do(register(content, run_id="triage-1"))
    return machine


def test_numbers_count_up_per_name_and_content_decides_what_is_new(machine: Machine) -> None:
    again = machine.do(register("bb"))
    other = machine.do(register("bb", name="other"))
    assert isinstance(again, Version)
    assert isinstance(other, Version)
    assert (again.id, other.id) == ("triage/2", "other/1")
    assert [version.number for version in machine.state.versions["triage"]] == [1, 2, 3]


def test_a_promotion_whose_answer_was_lost_moves_nothing_the_second_time(machine: Machine) -> None:
    first = machine.do(promote(1, "a", expected=0))
    machine.do(promote(2, "b", expected=1))
    repeated = machine.do(promote(1, "a", expected=0))
    assert repeated == first
    assert machine.state.alias("triage", "champion") == 2


def test_a_promotion_is_refused_if_somebody_was_faster(machine: Machine) -> None:
    machine.do(promote(1, "a"))
    machine.do(promote(2, "b"))
    with pytest.raises(StateError, match="stands at version 2, not at version 1"):
        machine.do(promote(3, "c", expected=1))
    with pytest.raises(StateError, match="not at no version"):
        machine.do(promote(3, "d", expected=0))
    assert machine.state.alias("triage", "champion") == 2


def test_rollbacks_go_back_one_promotion_each_and_promoting_after_one_starts_from_there(machine: Machine) -> None:
    for version in (1, 2, 3):
        machine.do(promote(version, f"p{version}"))
    back = [machine.do(Rollback("triage", "champion", "ada", "worse", f"r{n}")) for n in range(2)]
    assert [(move.previous, move.version) for move in back if isinstance(move, AliasMove)] == [(3, 2), (2, 1)]
    with pytest.raises(StateError, match="no earlier version"):
        machine.do(Rollback("triage", "champion", "ada", "worse", "r2"))
    machine.do(promote(3, "p4"))
    machine.do(Rollback("triage", "champion", "ada", "worse", "r3"))
    assert machine.state.alias("triage", "champion") == 1


def test_a_rollback_whose_answer_was_lost_goes_back_once(machine: Machine) -> None:
    for version in (1, 2, 3):
        machine.do(promote(version, f"p{version}"))
    command = Rollback("triage", "champion", "ada", "worse", "r")
    assert machine.do(command) == machine.do(command)
    assert machine.state.alias("triage", "champion") == 2


def test_where_an_alias_stood_at_a_moment(machine: Machine) -> None:
    before = machine.now
    for version in (1, 2):
        machine.do(promote(version, f"p{version}"))
    first, second = machine.state.moves["triage", "champion"]
    assert machine.state.aliases_at("triage", before) == {}
    assert machine.state.aliases_at("triage", second.at - timedelta(seconds=1)) == {"champion": 1}
    assert machine.state.aliases_at("triage", second.at) == {"champion": 2}
    assert (second.previous, second.by, second.why) == (1, "ada", "it beats the base")
    assert first.previous is None


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (promote(4, "x"), "triage/4"),
        (promote(0, "x"), "triage/0"),
        (Promote("triag", "champion", 1, "ada", "why", "x"), "triag/1"),
        (Rollback("triag", "champion", "ada", "why", "x"), "triag"),
        (register("dd", run_id="triage-9"), "triage-9"),
        (register("dd", evaluation_id="none"), "none"),
        (CheckpointFact(id="r/step-1", run_id="r", step=1, path=Path("/x")), "'r'"),
        (RunEnded(run_id="errors@1", status="failed"), "errors@1"),
        (EvaluationFact(id="e", run_id="r", passed=True), "'r'"),
        (DataFact(id="d", name="d", digest="d", stage="tokens", parent="errors@3"), "errors@3"),
        (RunFact(id="r", name="r", base="b", base_digest="", data_version="errors@3"), "errors@3"),
    ],
)
def test_what_is_unknown_is_named(machine: Machine, command: Command, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint) as caught:
        machine.do(command)
    assert caught.value.status == 404


def test_an_unknown_id_comes_with_the_nearest_known_one(machine: Machine) -> None:
    with pytest.raises(RequestError) as caught:
        check(machine.state, register("x", run_id="triage-11").fact)
    assert "triage-1" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("alias", "by", "why"), [("latest", "a", "b"), ("v3", "a", "b"), ("A", "a", "b"), ("x", " ", "b"), ("x", "a", "")]
)
def test_a_move_needs_a_possible_alias_an_author_and_a_reason(machine: Machine, alias: str, by: str, why: str) -> None:
    with pytest.raises(RequestError) as caught:
        machine.do(Promote("triage", alias, 1, by, why, "x"))
    assert caught.value.status == 400


def test_facts_do_not_change(machine: Machine) -> None:
    seq = machine.state.seq
    machine.do(DataFact(id="errors@1", name="errors", digest="d1", stage="examples", rows={"train": 8, "test": 2}))
    assert machine.state.seq == seq
    with pytest.raises(StateError, match="other facts"):
        machine.do(DataFact(id="errors@1", name="errors", digest="other", stage="examples"))
    with pytest.raises(StateError, match="id of a data"):
        machine.do(EvaluationFact(id="errors@1", passed=True))


def test_one_name_holds_one_kind(machine: Machine) -> None:
    fact = register("zz").fact.model_copy(update={"kind": "model"})
    with pytest.raises(StateError, match="kind adapter, not model"):
        machine.do(Register(fact, Artifact(path=Path("/v"), digest="zz")))


def test_a_checkpoint_may_be_written_again_until_something_is_made_from_it(machine: Machine) -> None:
    step = CheckpointFact(id="triage-1/step-5", run_id="triage-1", step=5, path=Path("/runs/x"), metrics={"loss": 0.5})
    machine.do(step)
    machine.do(EvaluationFact(id="e1", checkpoint_id=step.id, passed=True))
    machine.do(step)
    with pytest.raises(StateError, match="used by 'e1'"):
        machine.do(step.model_copy(update={"metrics": {"loss": 0.4}}))


def test_a_run_ends_once_and_takes_no_checkpoints_afterwards(machine: Machine) -> None:
    ended = RunEnded(run_id="triage-1", status="failed", verdict="rank 1 died")
    machine.do(ended)
    machine.do(ended)
    with pytest.raises(StateError, match="ended already: failed"):
        machine.do(RunEnded(run_id="triage-1", status="completed"))
    with pytest.raises(StateError, match="no more checkpoints"):
        machine.do(CheckpointFact(id="triage-1/step-9", run_id="triage-1", step=9, path=Path("/x")))
    assert machine.state.run_status("triage-1") == "failed"


def test_a_stopped_run_may_be_taken_up_by_another_driver_a_completed_one_not(machine: Machine) -> None:
    event = machine.state.entries["triage-1"]
    assert isinstance(event.fact, RunFact)
    again = event.fact.model_copy(update={"driver": Driver(job_id="02", node_id="n", pid=7)})
    with pytest.raises(StateError, match="another process"):
        machine.do(again)
    machine.do(RunEnded(run_id="triage-1", status="stopped"))
    machine.do(again)
    assert machine.state.run_status("triage-1") == "running"
    with pytest.raises(StateError, match="another base"):
        machine.do(again.model_copy(update={"base": "other"}))
    machine.do(RunEnded(run_id="triage-1", status="completed"))
    with pytest.raises(StateError, match="completed"):
        machine.do(again)


def test_what_a_run_says_outweighs_what_was_presumed(machine: Machine) -> None:
    presumed = RunEnded(run_id="triage-1", status="stopped", verdict="silent", presumed=True)
    machine.do(presumed)
    machine.do(RunEnded(run_id="triage-1", status="completed"))
    machine.do(presumed)
    assert machine.state.run_status("triage-1") == "completed"
    assert machine.state.running() == []


def test_applying_leaves_the_earlier_state_as_it_was(machine: Machine) -> None:
    before = machine.state
    aliases, entries = before.aliases("triage"), len(before.entries)
    machine.do(promote(1, "a"))
    assert (before.aliases("triage"), len(before.entries)) == (aliases, entries)
    assert machine.state.aliases("triage") == {"champion": 1}


def test_a_diverged_loss_survives_the_log() -> None:
    fact = CheckpointFact(id="r/step-1", run_id="r", step=1, path=Path("/x"), metrics={"loss": float("nan")})
    read = decode("checkpoint", encode(fact))
    assert encode(read) == encode(fact)
    version = Version(
        **dict(register("a", metrics={"loss": float("inf")}).fact),
        id="triage/1",
        number=1,
        digest="a",
        path=Path("/v"),
        created_at=START,
    )
    assert decode("version", encode(version)) == version


def test_an_event_of_a_newer_flywheel_is_refused_not_skipped() -> None:
    with pytest.raises(StateError, match="'hologram'"):
        decode("hologram", "{}")


def test_replaying_the_log_through_its_encoding_gives_the_live_state(machine: Machine) -> None:
    machine.do(promote(1, "a"))
    machine.do(promote(2, "b"))
    machine.do(Rollback("triage", "champion", "ada", "worse", "c"))
    read = [Event(e.seq, e.at, e.by, decode(e.fact.event, encode(e.fact))) for e in machine.log]
    assert replay(read) == machine.state
