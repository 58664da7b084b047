"""`flywheel status` names the adapters that the replica could not load."""

import io
from typing import Any

import pytest
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
    ReplicaState,
)
from rich.console import Console

from app.cli.status import _draw
from app.pipelines.status import Status, deployed


def drawn(health: Any, deployments: Any = ()) -> str:
    text = io.StringIO()
    gateway = {"url": "http://localhost:8000", "status": 200, "health": health}
    found = Status("/home", None, "Nothing runs.", {}, gateway, (), (), deployments)
    _draw(Console(file=text, width=160), found)
    return text.getvalue()


def test_a_failed_adapter_is_shown_with_its_reason() -> None:
    fault = {"why": "Adapter triage/3 cannot be loaded: its files are missing.", "at": "2026-12-02T22:00:00+00:00"}
    text = drawn({"llm": {"adapters_failed": {"triage/3": fault}, "keep_problems": {"tickets": "no such name"}}})
    assert "Adapters that could not be loaded" in text
    assert all(words in text for words in ("triage/3", "its files are missing", "2026-12-02T22:00:00", "no such name"))


def test_those_of_every_base_are_shown() -> None:
    fault = {"why": "its files are missing.", "at": "2026-12-02T22:00:00+00:00"}
    states = {"llm": {"adapters_failed": {"a/1": fault}}, "llm-other": {"adapters_failed": {"b/2": fault}}}
    assert all(version in drawn({"status": "ok", **states}) for version in ("a/1", "b/2"))


@pytest.mark.parametrize("health", ["refused", {}, {"llm": {"error": {"message": "no"}}}, {"llm": {"adapters": []}}])
def test_where_none_has_failed_there_is_no_table(health: Any) -> None:
    assert "could not be loaded" not in drawn(health)


def test_every_replica_is_shown_with_what_is_in_it_or_why_it_does_not_answer() -> None:
    replicas = [
        {"replica": "4f9a", "model": "smol", "running": 2, "adapters": ["triage/1", "other/2"]},
        {"replica": "77cc", "model": "smol", "running": 0, "adapters": [], "silent_s": 12.0},
        {"error": {"message": "The engine stopped."}},
    ]
    text = drawn({"llm": {"status": "degraded", "model": "smol", "replicas": replicas}})
    assert "triage/1, other/2" in text
    assert "12 s" in text
    assert "The engine stopped." in text


def test_a_deployment_that_is_not_well_says_why() -> None:
    trouble = "Deploying failed. Traceback (most recent call last):\n  File x\nDependencyError: The engine is wrong.\n"
    states = {ReplicaState.RUNNING: 1, ReplicaState.STARTING: 1}
    parts = {
        "llm": DeploymentStatusOverview(
            DeploymentStatus.UNHEALTHY, DeploymentStatusTrigger.HEALTH_CHECK_FAILED, states, trouble
        ),
        "gateway": DeploymentStatusOverview(
            DeploymentStatus.HEALTHY, DeploymentStatusTrigger.CONFIG_UPDATE_COMPLETED, {ReplicaState.RUNNING: 2}, ""
        ),
    }
    found = tuple(deployed({"flywheel": ApplicationStatusOverview(ApplicationStatus.UNHEALTHY, "", 0.0, parts)}))
    assert [(each.name, each.why) for each in found] == [
        ("llm", "DependencyError: The engine is wrong."),
        ("gateway", None),
    ]
    text = drawn({}, found)
    assert "1 running, 1 starting" in text
    assert "The engine is wrong." in text
    assert "2 running" in text
