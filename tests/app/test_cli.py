"""The command line as a user meets it: help with examples, exit codes, errors without tracebacks."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster import environment

VERBS = ("doctor", "demo", "plan", "data", "train", "evaluate", "models", "serve", "index", "search", "chat", "status")
ROOT = Path(__file__).resolve().parents[2]


def flywheel(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One command in a process of its own, with an empty home."""
    settings = {environment.HOME: str(tmp_path / "home"), "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "app", *arguments],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        check=False,
    )


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(tmp_path: Path, verb: str) -> None:
    done = flywheel(tmp_path, verb, "--help")
    assert done.returncode == 0
    assert f"flywheel {verb}" in done.stdout
    assert "Example" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "part", "code"),
    [
        (("plan", "nosuch"), "There is no recipe 'nosuch'", 2),
        (("plan", "error-triage", "--set", "optimiser.learning_rate=1"), "did you mean 'optimizer'?", 2),
        (("plan", "error-triage", "--set", "steps"), "--set 'steps' is not of the form", 2),
        (("train", "missing.yaml"), "There is no recipe 'missing.yaml'", 2),
        (("models", "show", "nothing"), "nothing", 1),
        (("models", "history", "nothing"), "nothing", 1),
        (("data", "show", "nothing"), "There is no data version 'nothing'", 2),
        (("search", "c", "q", "--url", "http://127.0.0.1:9"), "http://127.0.0.1:9 cannot be reached", 1),
        (("chat", "m", "hello", "--url", "http://127.0.0.1:9"), "http://127.0.0.1:9 cannot be reached", 1),
        (("frobnicate",), "frobnicate", 2),
    ],
)
def test_a_users_mistake_is_named_without_a_traceback(
    tmp_path: Path, arguments: tuple[str, ...], part: str, code: int
) -> None:
    done = flywheel(tmp_path, *arguments)
    assert done.returncode == code, done.stderr
    assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("address", "part"), [("127.0.0.1:1", "cannot be reached"), ("http://127.0.0.1:8265", "dashboard")]
)
def test_a_ray_that_is_not_there_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, part: str
) -> None:
    monkeypatch.setenv(environment.RAY_ADDRESS, address)
    began = time.monotonic()
    promoted = flywheel(tmp_path, "models", "promote", "a", "1", "--reason", "why")
    assert promoted.returncode != 0
    assert part in promoted.stderr
    assert address in promoted.stderr
    assert "Traceback" not in promoted.stderr
    status = flywheel(tmp_path, "status")
    assert status.returncode == 0
    assert part in status.stdout
    assert time.monotonic() - began < 40


def test_json_output_and_json_errors_are_one_object(tmp_path: Path) -> None:
    plan = flywheel(tmp_path, "plan", "error-triage", "--json")
    assert {line["name"] for line in json.loads(plan.stdout)["lines"]} >= {"batch", "data", "disk"}
    error = flywheel(tmp_path, "plan", "nosuch", "--json")
    assert error.returncode == 2
    assert json.loads(error.stdout)["error"]["type"] == "ConfigError"


def test_an_empty_installation_answers_reading_verbs(tmp_path: Path) -> None:
    listed = flywheel(tmp_path, "models", "list")
    assert listed.returncode == 0
    assert "Nothing is registered yet" in listed.stdout


def test_planning_imports_no_heavy_library(tmp_path: Path) -> None:
    script = (
        "import sys; from app.cli.application import cli; from app.pipelines.plan import plan; "
        "from app.recipe import load; from cluster.storage import Home; from pathlib import Path; "
        "plan(load('error-triage'), Home(Path(sys.argv[1])), Path(sys.argv[1])); "
        "print(*sorted({'ray', 'torch', 'vllm', 'transformers', 'mlflow'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == ""
