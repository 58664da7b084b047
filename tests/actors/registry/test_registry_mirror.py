import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from actors.registry.facts import Artifact, GateEnded, RunEnded, RunFact, VersionFact
from actors.registry.ledger import Ledger
from actors.registry.mirror import ForeignMove, Mirror
from actors.registry.rules import BeginGate, Promote, Register, Retire
from actors.registry.store import Log, MemoryEventStore
from cluster.errors import DependencyError, StateError
from cluster.tracking import MemoryTracker

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Bench:
    """A ledger in memory with its mirror; `restart` is a new process on the same log and the same tracker."""

    def __init__(self) -> None:
        self.log = Log()
        self.tracker = MemoryTracker()
        self.restart()

    def restart(self) -> None:
        self.store = MemoryEventStore(self.log)
        self.ledger = Ledger(self.store, clock=lambda: NOW)
        self.foreign: list[ForeignMove] = []
        self.mirror = Mirror(self.store, lambda: self.tracker, lambda: self.ledger.state, self.follow)

    def follow(self, move: ForeignMove) -> bool:
        """What was moved to version 1 is followed, all else is put back."""
        self.foreign.append(move)
        if move.version == 1:
            command = Promote("triage", move.alias, {1: 1.0}, "mlflow", "w", f"m{len(self.foreign)}", None, True, True)
            self.ledger.commit(command, by="mlflow")
        return move.version == 1

    def register(self, content: str) -> None:
        fact = VersionFact(
            name="triage", kind="adapter", source_path=Path("/s"), base="smol", run_id="triage-1", code_commit="abc"
        )
        self.ledger.commit(Register(fact, Artifact(path=Path("/v") / content, digest=content)), by="t")

    def promote(self, version: int) -> None:
        command = Promote("triage", "champion", {version: 1.0}, "t", "why", f"p{version}-{self.log.epoch}", force=True)
        self.ledger.commit(command, by="t")


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    run = bench.tracker.begin_run("triage-1", experiment="flywheel", params={}, tags={})
    bench.ledger.commit(RunFact(id="triage-1", name="triage", base="smol", base_digest="b", tracking_run=run), by="t")
    bench.register("aa")
    bench.promote(1)
    return bench


def test_versions_aliases_and_lineage_tags_are_shown(bench: Bench) -> None:
    bench.mirror.catch_up()
    assert bench.tracker.aliases("triage") == {"champion": 1}
    tags = bench.tracker.versions("triage")[1]
    assert (tags["flywheel.digest"], tags["flywheel.run"], tags["flywheel.code_commit"]) == ("aa", "triage-1", "abc")
    assert bench.mirror.status().behind == 0


def test_while_the_tracker_is_down_commits_go_on_and_afterwards_it_catches_up(bench: Bench) -> None:
    bench.tracker.down = True
    with pytest.raises(DependencyError):
        bench.mirror.catch_up()
    bench.register("bb")
    bench.promote(2)
    status = bench.mirror.status()
    assert status.behind == 4
    assert status.failure is not None
    bench.tracker.down = False
    bench.mirror.catch_up()
    assert bench.tracker.aliases("triage") == {"champion": 2}
    assert bench.mirror.status().failure is None


def test_a_new_registry_goes_on_where_the_old_one_died(bench: Bench) -> None:
    bench.mirror.catch_up()
    bench.register("bb")
    bench.restart()
    assert bench.mirror.status().behind == 1
    bench.mirror.catch_up()
    assert sorted(bench.tracker.versions("triage")) == [1, 2]


def test_what_was_shown_before_the_position_was_kept_is_shown_once(bench: Bench) -> None:
    bench.mirror.catch_up()
    bench.log.positions.clear()
    bench.restart()
    bench.mirror.catch_up()
    assert sorted(bench.tracker.versions("triage")) == [1]


class Stubborn(MemoryTracker):
    """A catalogue that will not have an alias called `canary`."""

    def put_alias(self, name: str, alias: str, number: int) -> None:
        if alias == "canary":
            raise DependencyError("That alias is reserved here.", retryable=False)
        super().put_alias(name, alias, number)


def test_what_the_tracker_will_never_take_does_not_hold_up_the_rest(bench: Bench) -> None:
    bench.mirror.catch_up()
    bench.tracker = Stubborn()
    bench.ledger.commit(Promote("triage", "canary", {1: 1.0}, "t", "why", "c", force=True), by="t")
    bench.register("bb")
    bench.restart()
    bench.mirror.catch_up()
    assert bench.mirror.status().refused == 1
    assert sorted(bench.tracker.versions("triage")) == [1, 2]


def test_what_somebody_deleted_in_the_tracker_comes_back_with_the_alias_that_needs_it(bench: Bench) -> None:
    bench.mirror.catch_up()
    bench.tracker = MemoryTracker()
    bench.restart()
    bench.register("bb")
    bench.mirror.catch_up()
    assert bench.tracker.aliases("triage") == {}
    bench.mirror.look()
    assert bench.tracker.aliases("triage") == {"champion": 1}


def test_a_tracker_that_has_lost_everything_is_filled_again(bench: Bench) -> None:
    bench.register("bb")
    bench.promote(2)
    bench.mirror.catch_up()
    bench.tracker = MemoryTracker()
    bench.restart()
    assert bench.mirror.status().behind == 0
    bench.mirror.look()
    assert sorted(bench.tracker.versions("triage")) == [1, 2]
    assert bench.tracker.aliases("triage") == {"champion": 2}
    assert bench.tracker.versions("triage")[2]["flywheel.stage"] == "promoted"
    assert bench.foreign == []


def test_a_move_that_cannot_be_put_back_is_said_once_and_stops_nothing(bench: Bench) -> None:
    bench.tracker = Stubborn()
    bench.restart()
    bench.ledger.commit(Promote("triage", "canary", {1: 1.0}, "t", "why", "c", force=True), by="t")
    bench.mirror.catch_up()
    for _ in range(3):
        bench.mirror.look()
    assert [(move.alias, move.version) for move in bench.foreign] == [("canary", None)]
    bench.register("bb")
    bench.mirror.catch_up()
    assert sorted(bench.tracker.versions("triage")) == [1, 2]


def test_the_end_of_a_run_that_died_reaches_the_tracker(bench: Bench) -> None:
    bench.ledger.commit(RunEnded(run_id="triage-1", status="stopped", presumed=True), by="registry")
    bench.mirror.catch_up()
    assert bench.tracker.run("flywheel:triage-1").status == "stopped"


def test_the_thread_survives_whatever_the_tracker_does(bench: Bench) -> None:
    class Broken(MemoryTracker):
        def all_aliases(self) -> dict[str, dict[str, int | None]]:
            raise ValueError("a tag that nobody expected")

    bench.tracker = Broken()
    thread = threading.Thread(target=bench.mirror.run)
    thread.start()
    deadline = time.monotonic() + 5
    while bench.mirror.status().failure is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "nobody expected" in str(bench.mirror.status().failure)
    assert thread.is_alive()
    bench.mirror.stop()
    thread.join(timeout=5)
    assert not thread.is_alive()


def test_a_fenced_registry_stops_mirroring(bench: Bench) -> None:
    MemoryEventStore(bench.log)
    with pytest.raises(StateError):
        bench.mirror.catch_up()
    bench.mirror.run()  # returns instead of retrying for ever


def test_the_thread_catches_up_by_itself_after_an_outage(bench: Bench) -> None:
    bench.tracker.down = True
    thread = threading.Thread(target=bench.mirror.run)
    thread.start()
    while bench.mirror.status().failure is None:
        time.sleep(0.01)
    bench.tracker.down = False
    deadline = time.monotonic() + 5
    while bench.mirror.status().behind and time.monotonic() < deadline:
        time.sleep(0.01)
    bench.mirror.stop()
    thread.join(timeout=5)
    assert bench.tracker.aliases("triage") == {"champion": 1}
    assert not thread.is_alive()


def test_stages_and_verdicts_are_shown(bench: Bench) -> None:
    bench.register("bb")
    bench.mirror.catch_up()
    stages = {number: tags["flywheel.stage"] for number, tags in bench.tracker.versions("triage").items()}
    assert stages == {1: "promoted", 2: "candidate"}
    bench.ledger.commit(BeginGate("triage/2", "t", "g"), by="t")
    bench.ledger.commit(GateEnded(gate_id="triage/2#gate-1", outcome="blocked", reason="too slow"), by="t")
    bench.mirror.catch_up()
    tags = bench.tracker.versions("triage")[2]
    assert (tags["flywheel.stage"], tags["flywheel.gate"]) == ("blocked", "too slow")
    bench.ledger.commit(Retire("triage/2", "t", "no use", "r"), by="t")
    bench.mirror.catch_up()
    assert bench.tracker.versions("triage")[2]["flywheel.stage"] == "retired"


def test_a_move_made_in_the_tracker_is_followed_or_put_back(bench: Bench) -> None:
    bench.register("bb")
    bench.promote(2)
    bench.mirror.catch_up()
    bench.mirror.look()
    assert bench.foreign == []

    bench.tracker.put_alias("triage", "champion", 1)
    bench.tracker.put_alias("triage", "mine", 2)
    bench.mirror.look()
    assert [(move.alias, move.version) for move in bench.foreign] == [("champion", 1)]
    assert bench.ledger.state.aliases("triage") == {"champion": 1}
    bench.mirror.catch_up()
    bench.mirror.look()
    assert bench.tracker.aliases("triage") == {"champion": 1}
    assert [(move.alias, move.version) for move in bench.foreign] == [("champion", 1), ("mine", 2)]

    bench.tracker.drop_alias("triage", "champion")
    bench.mirror.look()
    assert bench.foreign[-1].version is None
    assert bench.tracker.aliases("triage") == {"champion": 1}


def test_nothing_is_taken_for_a_foreign_move_while_the_mirror_is_behind(bench: Bench) -> None:
    bench.mirror.look()
    bench.mirror.catch_up()
    bench.register("bb")
    bench.promote(2)
    bench.mirror.look()
    assert bench.foreign == []
