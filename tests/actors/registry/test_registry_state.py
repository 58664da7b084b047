from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from actors.registry import views
from actors.registry.facts import (
    AliasMove,
    Artifact,
    CheckpointFact,
    Collected,
    DataFact,
    Driver,
    EvaluationFact,
    Event,
    Fact,
    FeedbackFact,
    GateBegun,
    GateCheck,
    GateEnded,
    Origin,
    RunEnded,
    RunFact,
    RunIncident,
    Version,
    VersionFact,
    decode,
    encode,
)
from actors.registry.lineage import chain
from actors.registry.rules import Adopt, BeginGate, Command, Pin, Promote, Register, Retire, Rollback, check, decide
from actors.registry.snapshot import Split
from actors.registry.state import State, apply, held, replay, snapshot
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


def promote(
    to: int | Split, command: str, *, expected: int | Split | None = None, alias: str = "champion", force: bool = False
) -> Promote:
    split = to if isinstance(to, dict) else {to: 1.0}
    if isinstance(expected, int):
        expected = {expected: 1.0} if expected else {}
    return Promote("triage", alias, split, "ada", "it beats the base", command, expected, force)


def gate(machine: Machine, version: str, *, passed: bool = True) -> None:
    begun = machine.do(BeginGate(version, "ada", f"gate-{machine.state.seq}"))
    assert isinstance(begun, GateBegun)
    check = GateCheck(name="metric", passed=passed, reason="+0.5 [+0.4, +0.6]" if passed else "+0.1 [-0.1, +0.2]")
    outcome = "passed" if passed else "blocked"
    machine.do(GateEnded(gate_id=begun.id, outcome=outcome, checks=(check,), reason=check.reason))


@pytest.fixture
def machine() -> Machine:
    """A run with a checkpoint, and three versions of `triage` that have passed a gate."""
    machine = Machine()
    machine.do(DataFact(id="errors@1", name="errors", digest="d1", stage="examples", rows={"train": 8, "test": 2}))
    machine.do(DataFact(id="errors@2", name="errors", digest="d2", stage="tokens", parent="errors@1"))
    machine.do(RunFact(id="triage-1", name="triage", base="smol", base_digest="b", data_version="errors@2"))
    machine.do(CheckpointFact(id="triage-1/step-5", run_id="triage-1", step=5, path=Path("/runs/x")))
    for content in ("aa", "bb", "cc"):
        version = machine.do(register(content, run_id="triage-1"))
        assert isinstance(version, Version)
        gate(machine, version.id)
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
    assert machine.state.split("triage", "champion") == {2: 1.0}


def test_a_promotion_is_refused_if_somebody_was_faster(machine: Machine) -> None:
    machine.do(promote(1, "a"))
    machine.do(promote(2, "b"))
    with pytest.raises(StateError, match="stands at version 2, not at version 1"):
        machine.do(promote(3, "c", expected=1))
    with pytest.raises(StateError, match="not at no version"):
        machine.do(promote(3, "d", expected=0))
    assert machine.state.split("triage", "champion") == {2: 1.0}


def test_rollbacks_go_back_one_promotion_each_and_promoting_after_one_starts_from_there(machine: Machine) -> None:
    for version in (1, 2, 3):
        machine.do(promote(version, f"p{version}"))
    back = [machine.do(Rollback("triage", "champion", "ada", "worse", f"r{n}")) for n in range(2)]
    assert [(move.previous, move.version) for move in back if isinstance(move, AliasMove)] == [(3, 2), (2, 1)]
    with pytest.raises(StateError, match="no earlier version"):
        machine.do(Rollback("triage", "champion", "ada", "worse", "r2"))
    machine.do(promote(3, "p4"))
    machine.do(Rollback("triage", "champion", "ada", "worse", "r3"))
    assert machine.state.split("triage", "champion") == {1: 1.0}


def test_a_rollback_whose_answer_was_lost_goes_back_once(machine: Machine) -> None:
    for version in (1, 2, 3):
        machine.do(promote(version, f"p{version}"))
    command = Rollback("triage", "champion", "ada", "worse", "r")
    assert machine.do(command) == machine.do(command)
    assert machine.state.split("triage", "champion") == {2: 1.0}


def test_where_an_alias_stood_at_a_moment(machine: Machine) -> None:
    before = machine.now
    for version in (1, 2):
        machine.do(promote(version, f"p{version}"))
    first, second = machine.state.moves["triage", "champion"]
    assert machine.state.moves_at("triage", before) == {}
    assert machine.state.moves_at("triage", second.at - timedelta(seconds=1)) == {"champion": first}
    assert machine.state.moves_at("triage", second.at) == {"champion": second}
    assert (second.previous, second.by, second.why) == (1, "ada", "it beats the base")
    assert first.previous is None


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (promote(4, "x"), "triage/4"),
        (promote(0, "x"), "triage/0"),
        (Promote("triag", "champion", {1: 1.0}, "ada", "why", "x"), "triag/1"),
        (Rollback("triag", "champion", "ada", "why", "x"), "triag"),
        (register("dd", run_id="triage-9"), "triage-9"),
        (register("dd", evaluation_id="none"), "none"),
        (CheckpointFact(id="r/step-1", run_id="r", step=1, path=Path("/x")), "'r'"),
        (RunEnded(run_id="errors@1", status="failed"), "errors@1"),
        (BeginGate("triage/9", "ada", "x"), "triage/9"),
        (GateEnded(gate_id="triage/1#gate-9", outcome="passed"), "triage/1#gate-9"),
        (Retire("triage/9", "ada", "why", "x"), "triage/9"),
        (Pin("triage/9", True, "ada", "why"), "triage/9"),
        (FeedbackFact(id="f", digest="d", versions=("triage/9",), rows=1, since=START, until=START), "triage/9"),
        (EvaluationFact(id="e", run_id="r", passed=True), "'r'"),
        (DataFact(id="d", name="d", digest="d", stage="tokens", parent="errors@3"), "errors@3"),
        (RunFact(id="r", name="r", base="b", base_digest="", data_version="errors@3"), "errors@3"),
        (RunIncident(id="i", run_id="r", kind="killed", verdict="Rank 1 died.", step=1, at=START), "'r'"),
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
    ("alias", "by", "why"),
    [
        ("latest", "a", "b"),
        ("v3", "a", "b"),
        ("canary.eu", "a", "b"),
        ("A", "a", "b"),
        ("x", " ", "b"),
        ("x", "a", ""),
        ("x", "a", "\x1b[2J"),
    ],
)
def test_a_move_needs_a_possible_alias_an_author_and_a_reason(machine: Machine, alias: str, by: str, why: str) -> None:
    with pytest.raises(RequestError) as caught:
        machine.do(Promote("triage", alias, {1: 1.0}, by, why, "x"))
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


def test_a_run_that_is_taken_up_says_what_is_set_otherwise(machine: Machine) -> None:
    event = machine.state.entries["triage-1"]
    assert isinstance(event.fact, RunFact)
    machine.do(RunEnded(run_id="triage-1", status="failed"))
    machine.do(event.fact.model_copy(update={"changes": {"parallel.workers.max": "2 → 1"}}))
    assert views.run(machine.state, "triage-1").run.changes == {"parallel.workers.max": "2 → 1"}


def test_what_happened_to_the_workers_is_told_with_the_run_once(machine: Machine) -> None:
    day = timedelta(days=1)
    later = RunIncident(id="i2", run_id="triage-1", kind="stuck", verdict="Rank 0 is stuck.", step=7, at=START + day)
    first = RunIncident(id="i1", run_id="triage-1", kind="killed", verdict="Rank 1 died.", step=5, at=START)
    for fact in (later, first, first):
        machine.do(fact)
    assert views.run(machine.state, "triage-1").incidents == (first, later)
    assert machine.state.run_status("triage-1") == "running"
    links = {link.id: link for link in chain(machine.state, "triage-1")}
    assert links["i1"].note == "Rank 1 died."
    assert links["i1"].parents == ("triage-1",)


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
    with pytest.raises(StateError, match="cannot read: hologram"):
        decode("run-ended", '{"run_id": "r", "status": "failed", "hologram": 1}')
    with pytest.raises(StateError, match="cannot read"):
        decode("run-ended", "not json")
    with pytest.raises(StateError, match="'hologram'"):
        decode("hologram", "{}")


def test_replaying_the_log_through_its_encoding_gives_the_live_state(machine: Machine) -> None:
    machine.do(promote(1, "a"))
    machine.do(promote(2, "b"))
    machine.do(Rollback("triage", "champion", "ada", "worse", "c"))
    read = [Event(e.seq, e.at, e.by, decode(e.fact.event, encode(e.fact))) for e in machine.log]
    assert replay(read) == machine.state


@pytest.mark.parametrize("passed", [None, False])
def test_without_a_passed_gate_only_force_promotes_and_that_is_kept(machine: Machine, passed: bool | None) -> None:
    machine.do(register("dd"))
    if passed is not None:
        gate(machine, "triage/4", passed=passed)
    with pytest.raises(StateError) as caught:
        machine.do(promote(4, "a"))
    assert ("blocked" if passed is False else "candidate") in caught.value.message
    assert "evaluating or retired" in str(caught.value.hint)
    if passed is False:
        assert "metric: +0.1 [-0.1, +0.2]" in caught.value.message
    move = machine.do(promote(4, "b", force=True))
    assert isinstance(move, AliasMove)
    assert (move.forced, move.why) == (True, "it beats the base")
    assert machine.state.stages["triage/4"] == "promoted"
    gated = machine.do(promote(1, "c", force=True))
    assert isinstance(gated, AliasMove)
    assert not gated.forced


def test_a_gate_that_was_overtaken_by_force_leaves_the_version_promoted(machine: Machine) -> None:
    machine.do(register("dd"))
    begun = machine.do(BeginGate("triage/4", "ada", "a"))
    assert isinstance(begun, GateBegun)
    machine.do(promote(4, "b", force=True))
    with pytest.raises(StateError, match="cannot be gated"):
        machine.do(BeginGate("triage/4", "ada", "c"))
    machine.do(GateEnded(gate_id=begun.id, outcome="blocked"))
    assert machine.state.stages["triage/4"] == "promoted"


def test_a_gate_ends_with_its_own_evaluation_and_passes_only_if_that_did(machine: Machine) -> None:
    machine.do(EvaluationFact(id="e2", version_id="triage/2", passed=True))
    machine.do(EvaluationFact(id="e1", version_id="triage/1", passed=False))
    begun = machine.do(BeginGate("triage/1", "ada", "a"))
    assert isinstance(begun, GateBegun)
    with pytest.raises(RequestError, match="measured triage/2, not triage/1"):
        machine.do(GateEnded(gate_id=begun.id, outcome="passed", evaluation_id="e2"))
    with pytest.raises(RequestError, match="was not passed"):
        machine.do(GateEnded(gate_id=begun.id, outcome="passed", evaluation_id="e1"))
    machine.do(GateEnded(gate_id=begun.id, outcome="blocked", evaluation_id="e1"))


def test_a_rollback_goes_somewhere_else(machine: Machine) -> None:
    for command, version in enumerate((3, 1, 2, 1)):
        machine.do(promote(version, f"p{command}"))
    machine.do(Retire("triage/2", "ada", "old", "r"))
    move = machine.do(Rollback("triage", "champion", "ada", "worse", "b"))
    assert isinstance(move, AliasMove)
    assert (move.previous, move.version) == (1, 3)


def test_force_is_not_inherited_by_the_next_move(machine: Machine) -> None:
    machine.do(register("dd"))
    machine.do(promote(4, "a", alias="canary", force=True))
    with pytest.raises(StateError, match="promoted by force, without a passed gate"):
        machine.do(promote(4, "b"))


LEGAL_MOVES = {
    ("candidate", "gate"), ("candidate", "retire"), ("candidate", "force"),
    ("evaluating", "gate"), ("evaluating", "force"),
    ("passed", "gate"), ("passed", "promote"), ("passed", "retire"), ("passed", "force"),
    ("blocked", "gate"), ("blocked", "retire"), ("blocked", "force"),
    ("promoted", "promote"), ("promoted", "retire"), ("promoted", "force"),
}  # fmt: skip
STAGES = ("candidate", "evaluating", "passed", "blocked", "promoted", "retired")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("move", ["gate", "promote", "force", "retire"])
def test_every_move_from_every_stage_is_legal_or_refused_by_name(machine: Machine, stage: str, move: str) -> None:
    machine.do(register("dd"))
    if stage == "evaluating":
        machine.do(BeginGate("triage/4", "ada", "begin"))
    if stage in ("passed", "blocked", "promoted"):
        gate(machine, "triage/4", passed=stage != "blocked")
    if stage == "promoted":
        machine.do(promote(4, "there"))
        machine.do(promote(1, "and away"))
    if stage == "retired":
        machine.do(Retire("triage/4", "ada", "why", "retire"))
    assert machine.state.stages["triage/4"] == stage
    seq = machine.state.seq
    command: Command = {
        "gate": BeginGate("triage/4", "ada", "m"),
        "promote": promote(4, "m"),
        "force": promote(4, "m", force=True),
        "retire": Retire("triage/4", "ada", "why", "m"),
    }[move]
    if (stage, move) in LEGAL_MOVES:
        machine.do(command)
        assert machine.state.seq > seq
    elif (stage, move) == ("retired", "retire"):
        machine.do(command)
        assert machine.state.seq == seq
    else:
        with pytest.raises(StateError, match=f"triage/4 is {stage}"):
            machine.do(command)
        assert machine.state.seq == seq


def test_a_verdict_does_not_change_and_a_second_gate_takes_the_first_ones_place(machine: Machine) -> None:
    first, second = (machine.do(BeginGate("triage/1", "ada", command)) for command in ("a", "b"))
    assert isinstance(first, GateBegun)
    assert isinstance(second, GateBegun)
    with pytest.raises(StateError, match="over already: abandoned"):
        machine.do(GateEnded(gate_id=first.id, outcome="passed"))
    assert machine.state.stages["triage/1"] == "evaluating"
    blocked = GateEnded(gate_id=second.id, outcome="blocked", reason="too slow")
    machine.do(blocked)
    seq = machine.state.seq
    machine.do(blocked)
    machine.do(GateEnded(gate_id=second.id, outcome="abandoned"))
    assert machine.state.seq == seq
    with pytest.raises(StateError, match=r"blocked \(too slow\)"):
        machine.do(GateEnded(gate_id=second.id, outcome="passed"))


def test_a_gate_with_a_failed_check_cannot_pass(machine: Machine) -> None:
    begun = machine.do(BeginGate("triage/1", "ada", "a"))
    assert isinstance(begun, GateBegun)
    check = GateCheck(name="parity", passed=False, reason="0.4 nats")
    with pytest.raises(RequestError, match="failed check: parity"):
        machine.do(GateEnded(gate_id=begun.id, outcome="passed", checks=(check,)))


def test_an_abandoned_gate_leaves_the_stage_that_was(machine: Machine) -> None:
    begun = machine.do(BeginGate("triage/1", "ada", "a"))
    assert isinstance(begun, GateBegun)
    machine.do(GateEnded(gate_id=begun.id, outcome="abandoned", reason="its driver died"))
    assert machine.state.stages["triage/1"] == "passed"
    assert machine.state.measuring() == []


def test_traffic_can_be_split_and_the_whole_split_is_compared_moved_and_rolled_back(machine: Machine) -> None:
    machine.do(promote(1, "a"))
    move = machine.do(promote({2: 0.1, 1: 0.9}, "b", expected=1))
    assert isinstance(move, AliasMove)
    assert (move.split, move.version, move.previous_split) == ({1: 0.9, 2: 0.1}, 1, {1: 1.0})
    with pytest.raises(StateError, match=r"stands at versions 1 \(90%\), 2 \(10%\), not at version 1"):
        machine.do(promote(2, "c", expected=1))
    machine.do(promote(2, "d", expected={1: 0.9, 2: 0.1}))
    machine.do(Rollback("triage", "champion", "ada", "worse", "e"))
    assert machine.state.split("triage", "champion") == {1: 0.9, 2: 0.1}
    assert machine.state.aliases("triage") == {"champion": 1}


@pytest.mark.parametrize("split", [{}, {1: 0.5}, {1: 0.5, 2: 0.6}, {1: 1.5, 2: -0.5}, {1: 1.0, 2: 0.0}])
def test_shares_that_are_no_shares_are_refused(machine: Machine, split: Split) -> None:
    with pytest.raises(RequestError, match="add up to 1"):
        machine.do(promote(split, "a"))


def test_a_canary_needs_a_passed_gate_for_each_of_its_versions(machine: Machine) -> None:
    machine.do(register("dd"))
    with pytest.raises(StateError, match="triage/4 is candidate"):
        machine.do(promote({1: 0.9, 4: 0.1}, "a"))


def test_what_an_alias_stands_at_is_not_retired_and_rollbacks_step_over_what_was(machine: Machine) -> None:
    for version in (1, 2, 3):
        machine.do(promote(version, f"p{version}"))
    with pytest.raises(StateError, match="has the alias champion"):
        machine.do(Retire("triage/3", "ada", "old", "r3"))
    machine.do(Retire("triage/2", "ada", "old", "r2"))
    move = machine.do(Rollback("triage", "champion", "ada", "worse", "b"))
    assert isinstance(move, AliasMove)
    assert move.version == 1
    with pytest.raises(StateError, match="no earlier version"):
        machine.do(Rollback("triage", "champion", "ada", "worse", "c"))


def test_a_retired_version_is_not_served_and_its_facts_stay(machine: Machine) -> None:
    machine.do(Retire("triage/2", "ada", "old", "r2"))
    assert [*snapshot(machine.state).models["triage"].versions] == [1, 3]
    assert machine.state.versions["triage"][1].digest == "bb"


def test_what_is_held_is_not_collected_and_what_is_collected_is_not_promoted(machine: Machine) -> None:
    machine.do(promote(1, "a"))
    machine.do(promote(2, "b"))
    machine.do(Pin("triage/3", True, "ada", "for the auditor"))
    machine.do(register("dd", parent="triage/2"))
    machine.do(register("ee"))
    machine.do(RunEnded(run_id="triage-1", status="completed"))
    assert {id_: why.split()[0] for id_, why in held(machine.state).items()} == {
        "triage/1": "triage@champion",
        "triage/2": "triage@champion",
        "triage/3": "pinned",
    }
    for id_ in ("triage/1", "triage/2", "triage/3"):
        with pytest.raises(StateError, match=f"files of {id_} stay"):
            machine.do(Collected(version_ids=(id_,)))
    machine.do(Collected(version_ids=("triage/4", "triage/5")))
    with pytest.raises(StateError, match="files have been freed"):
        machine.do(promote(5, "c", force=True))
    assert [*snapshot(machine.state).models["triage"].versions] == [1, 2, 3]
    machine.do(Pin("triage/3", False, "ada", "the audit is over"))
    assert "triage/3" not in held(machine.state)


def test_registering_collected_content_again_brings_the_same_version_back(machine: Machine) -> None:
    machine.do(RunEnded(run_id="triage-1", status="completed"))
    machine.do(Collected(version_ids=("triage/3",)))
    again = machine.do(register("cc"))
    assert isinstance(again, Version)
    assert again.id == "triage/3"
    assert machine.state.collected == frozenset()
    assert [*snapshot(machine.state).models["triage"].versions] == [1, 2, 3]


def test_a_parent_is_held_by_a_child_that_is(machine: Machine) -> None:
    machine.do(RunEnded(run_id="triage-1", status="completed"))
    machine.do(register("dd", parent="triage/3"))
    gate(machine, "triage/4")
    machine.do(promote(4, "a"))
    assert held(machine.state)["triage/3"] == "triage/4 was made from it"


def test_a_log_with_absolute_paths_is_read_as_one_whose_home_may_have_moved() -> None:
    old = (
        '{"name":"triage","kind":"adapter","source_path":"/s","base":"b","id":"triage/1","number":1,"digest":"d",'
        '"path":"/old/home/versions/triage/0123456789ab","created_at":"2026-01-01T00:00:00Z"}'
    )
    version = decode("version", old)
    assert isinstance(version, Version)
    assert version.path == Path("triage/0123456789ab")


def test_a_log_from_before_aliases_were_split_is_read(machine: Machine) -> None:
    old = (
        '{"id":"triage@champion#1","name":"triage","alias":"champion","version":2,"previous":1,"by":"ada","why":"w",'
        '"at":"2026-01-01T00:00:00Z","action":"promote","command":"c"}'
    )
    move = decode("alias", old)
    assert isinstance(move, AliasMove)
    assert (move.split, move.previous_split, move.forced) == ({2: 1.0}, {1: 1.0}, False)


def test_a_version_that_comes_home_finds_its_facts_as_they_are(machine: Machine) -> None:
    run = machine.state.entries["triage-1"].fact
    assert isinstance(run, RunFact)
    fact = VersionFact(name="triage", kind="adapter", source_path=Path("/t.tar"), base="smol", run_id="triage-1")
    origin = Origin(version_id="there/1", signed_by="k", exported_at=START, exported_by="k")
    coming = Register(fact, Artifact(path=Path("triage/zz"), digest="zz"), origin)
    machine.do(RunEnded(run_id="triage-1", status="stopped", presumed=True))
    ended = RunEnded(run_id="triage-1", status="completed")
    came = machine.do(Adopt((run.model_copy(update={"tracking_run": None}), ended), coming))
    assert isinstance(came, Version)
    assert came.origin == origin
    assert machine.state.run_status("triage-1") == "completed"  # what a run says outweighs what was presumed
    machine.do(RunFact(id="here", name="n", base="b", base_digest=""))
    elsewhere = coming.fact.model_copy(update={"run_id": None})
    machine.do(
        Adopt((RunEnded(run_id="here", status="failed"),), Register(elsewhere, Artifact(path=Path("y"), digest="y")))
    )
    assert machine.state.run_status("here") == "running"
    other = run.model_copy(update={"base": "another"})
    with pytest.raises(StateError, match="other facts"):
        machine.do(Adopt((other,), coming))
    with pytest.raises(RequestError, match="not made from 'alias'"):
        machine.do(Adopt((machine.do(promote(1, "a")),), coming))
