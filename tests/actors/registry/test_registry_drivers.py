from collections.abc import Iterable
from pathlib import Path

import pytest

from actors.registry.drivers import close_abandoned, dead
from actors.registry.facts import Artifact, Driver, RunEnded, RunFact, VersionFact
from actors.registry.ledger import Ledger
from actors.registry.rules import BeginGate, Register
from actors.registry.store import MemoryEventStore

HERE = Driver(job_id="01", node_id="node-a", pid=11)
ELSEWHERE = Driver(job_id="01", node_id="node-of-an-earlier-cluster", pid=22)


@pytest.mark.parametrize(
    ("status", "expected"), [("RUNNING", False), ("SUCCEEDED", True), ("FAILED", True), ("STOPPED", True)]
)
def test_a_driver_is_dead_when_its_job_is_over(status: str, expected: bool) -> None:
    assert (HERE in dead([HERE], nodes={"node-a"}, jobs={"01": status})) is expected


def test_a_job_id_of_an_earlier_cluster_is_not_mistaken_for_ours() -> None:
    assert list(dead([HERE, ELSEWHERE], nodes={"node-a"}, jobs={"01": "RUNNING"})) == [ELSEWHERE]


def test_a_job_that_the_table_does_not_know_counts_as_alive() -> None:
    assert dead([HERE], nodes={"node-a"}, jobs={}) == {}


def run(id_: str, driver: Driver | None) -> RunFact:
    return RunFact(id=id_, name="r", base="b", base_digest="", driver=driver)


def test_runs_of_dead_drivers_are_closed_with_a_verdict_and_no_others() -> None:
    ledger = Ledger(MemoryEventStore())
    for fact in (run("alive", HERE), run("lost", ELSEWHERE), run("by-hand", None), run("done", ELSEWHERE)):
        ledger.commit(fact, by="t")
    ledger.commit(RunEnded(run_id="done", status="completed"), by="t")

    def only_elsewhere(asked: Iterable[Driver]) -> dict[Driver, str]:
        assert set(asked) == {HERE, ELSEWHERE}
        return {ELSEWHERE: "its node is gone"}

    close_abandoned(ledger, only_elsewhere)
    state = ledger.state
    assert {id_: state.run_status(id_) for id_ in ("alive", "lost", "by-hand", "done")} == {
        "alive": "running",
        "lost": "stopped",
        "by-hand": "running",
        "done": "completed",
    }
    assert state.ended["lost"].verdict == "its node is gone"
    assert state.ended["lost"].presumed


def test_a_gate_whose_driver_died_is_abandoned() -> None:
    ledger = Ledger(MemoryEventStore())
    fact = VersionFact(name="triage", kind="adapter", source_path=Path("/s"), base="smol")
    ledger.commit(Register(fact, Artifact(path=Path("aa"), digest="aa")), by="t")
    ledger.commit(BeginGate("triage/1", "t", "g", ELSEWHERE), by="t")
    close_abandoned(ledger, lambda _: {ELSEWHERE: "its node is gone"})
    assert ledger.state.stages["triage/1"] == "candidate"
    assert ledger.state.verdicts["triage/1#gate-1"].reason == "its node is gone"
