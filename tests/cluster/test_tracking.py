"""What is MLflow's own trouble: fresh databases, versions registered by hand, a server that is away."""

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.errors import DependencyError
from cluster.storage import Home
from cluster.tracking import MlflowTracker, TrackedVersion, prepare_tracking

pytestmark = pytest.mark.integration

_FIRST_USE = """
import sys
from pathlib import Path
from cluster.storage import Home
from cluster.tracking import MlflowTracker, prepare_tracking
tracker = MlflowTracker(prepare_tracking(Home(Path(sys.argv[1]))))
run = tracker.begin_run(sys.argv[2], experiment="first", params={}, tags={})
tracker.log_metrics(run, {"loss": 1.0}, step=1)
sys.stdout.write(run)
"""


def test_processes_that_meet_at_a_fresh_home_share_one_sound_database(tmp_path: Path) -> None:
    root = tmp_path / "home"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _FIRST_USE, str(root), f"run-{number}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for number in range(3)
    ]
    outcomes = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], outcomes
    tracker = MlflowTracker(prepare_tracking(Home(root)))
    runs = {run for run, _ in outcomes}
    assert len(runs) == 3
    assert all(tracker.history(run, "loss") == [(1, 1.0)] for run in runs)
    assert not list(root.glob(".partial-*"))


def test_artifacts_lie_in_the_home_not_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    home = Home(tmp_path / "home")
    uri = prepare_tracking(home)
    run = MlflowTracker(uri).begin_run("r", experiment="triage", params={}, tags={})
    MlflowClient(uri).log_text(run, "hello", "note.txt")
    assert [path.read_text() for path in home.tracking_artifacts.rglob("note.txt")] == ["hello"]
    assert list((tmp_path / "cwd").iterdir()) == []


def test_our_numbers_hold_when_somebody_registers_by_hand_in_mlflow(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    home = Home(tmp_path / "home")
    uri = prepare_tracking(home)
    client, tracker = MlflowClient(uri, uri), MlflowTracker(uri)
    client.create_registered_model("triage")
    client.create_model_version("triage", str(tmp_path), await_creation_for=0)
    tracker.put_version(TrackedVersion("triage", 1, tmp_path))
    tracker.put_alias("triage", "champion", 1)
    assert tracker.aliases("triage") == {"champion": 1}
    assert str(client.get_model_version_by_alias("triage", "champion").version) == "2"


def test_a_server_that_is_away_is_worth_another_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracker = MlflowTracker("http://ada:secret@127.0.0.1:9")
    with pytest.raises(DependencyError) as caught:
        tracker.versions("triage")
    assert caught.value.retryable
    assert "secret" not in str(caught.value)
