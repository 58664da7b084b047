"""A tracker shows a run; it never decides about one."""

from pathlib import Path
from typing import cast

from actors.registry.client import RegistryClient
from actors.registry.state import RunEnded
from app import recipe as recipes
from app.pipelines import stages
from cluster.errors import DependencyError
from cluster.progress import silent
from cluster.storage import Home
from cluster.tracking import MemoryTracker, TrackedStatus


class AwayTracker(MemoryTracker):
    """A tracker whose server is down."""

    def begin_run(self, key: str, **_: object) -> str:
        raise DependencyError("MLflow does not answer")

    def end_run(self, run: str, status: TrackedStatus) -> None:
        raise DependencyError("MLflow does not answer")


class Ends:
    """The part of the registry's client that ending a run needs."""

    def __init__(self) -> None:
        self.heard: list[RunEnded] = []

    def end_run(self, fact: RunEnded) -> RunEnded:
        self.heard.append(fact)
        return fact


def ground(tracker: MemoryTracker, registry: Ends, tmp_path: Path) -> stages.Ground:
    recipe = recipes.load("error-triage")
    return stages.Ground(recipe, Home(tmp_path), cast(RegistryClient, registry), tracker, "memory", silent)


def test_a_run_begins_and_ends_while_the_tracker_is_away(tmp_path: Path) -> None:
    registry = Ends()
    standing = ground(AwayTracker(), registry, tmp_path)
    assert stages.begin_tracking(standing, "run-1", {"steps": 3}, "abc") is None
    ended = RunEnded(run_id="run-1", status="completed", verdict="3 steps")
    stages.end_run(standing, "tracked", ended)
    stages.end_run(standing, None, ended)
    assert registry.heard == [ended, ended]


def test_a_tracker_that_is_there_gets_settings_and_end(tmp_path: Path) -> None:
    tracker, registry = MemoryTracker(), Ends()
    standing = ground(tracker, registry, tmp_path)
    run = stages.begin_tracking(standing, "run-1", {"optimizer": {"learning_rate": 0.1}}, "abc")
    assert run is not None
    stages.end_run(standing, run, RunEnded(run_id="run-1", status="stopped"))
    shown = tracker.run(run)
    assert shown.params["optimizer.learning_rate"] == "0.1"
    assert shown.status == "stopped"
