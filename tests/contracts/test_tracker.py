"""What every tracker must do: memory, MLflow's own database in SQLite and in PostgreSQL, an MLflow server in front."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cluster.errors import DependencyError
from cluster.storage import Home
from cluster.tracking import MemoryTracker, MlflowTracker, TrackedVersion, Tracker, prepare_tracking
from tests.postgres import Postgres


@pytest.fixture(scope="module")
def tracking_home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("tracking"))


@pytest.fixture(scope="module")
def server_uri(tracking_home: Home) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", prepare_tracking(tracking_home)]
    command += ["--artifacts-destination", str(tracking_home.tracking_artifacts)]
    log = tracking_home.root / "server.log"
    # MLflow leaves lock files of its job store in the temporary folder.
    settings = os.environ | {"TMPDIR": str(tracking_home.root)}
    with log.open("w") as output:
        server = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            cwd=tracking_home.root,
            env=settings,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 90
        while not _healthy(port):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, 15)
        server.wait(timeout=20)


@pytest.fixture(scope="module")
def postgres_uri(tracking_home: Home, postgres: Postgres) -> str:
    return prepare_tracking(tracking_home, postgres.uri(postgres.create_database()))


def _healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(
    params=[
        "memory",
        pytest.param("mlflow", marks=pytest.mark.integration),
        pytest.param("mlflow-server", marks=pytest.mark.integration),
        pytest.param("mlflow-postgres", marks=pytest.mark.integration),
    ]
)
def tracker(request: pytest.FixtureRequest) -> Tracker:
    if request.param == "memory":
        return MemoryTracker()
    if request.param == "mlflow":
        return MlflowTracker(prepare_tracking(request.getfixturevalue("tracking_home")))
    if request.param == "mlflow-postgres":
        return MlflowTracker(request.getfixturevalue("postgres_uri"))
    return MlflowTracker(request.getfixturevalue("server_uri"))


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A model's name of this test alone: the parametrized trackers share one database."""
    return "".join(letter if letter.isalnum() else "-" for letter in request.node.name.lower())[-60:].strip("-")


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    return tmp_path / "adapter"


def test_a_run_keeps_its_parameters_metrics_and_end(tracker: Tracker, name: str) -> None:
    run = tracker.begin_run(name, experiment="triage", params={"r": "16"}, tags={"data": "errors@1"})
    for step, loss in ((20, 0.5), (1, 2.0)):
        tracker.log_metrics(run, {"loss": loss}, step=step)
    assert tracker.history(run, "loss") == [(1, 2.0), (20, 0.5)]
    shown = tracker.run(run)
    assert (shown.status, shown.params["r"], shown.tags["data"]) == ("running", "16", "errors@1")
    tracker.end_run(run, "stopped")
    tracker.end_run(run, "stopped")
    assert tracker.run(run).status == "stopped"


def test_a_run_that_is_taken_up_again_is_the_same_run(tracker: Tracker, name: str) -> None:
    run = tracker.begin_run(name, experiment="triage", params={"r": "16"}, tags={})
    tracker.log_metrics(run, {"loss": 2.0}, step=1)
    tracker.end_run(run, "failed")
    again = tracker.begin_run(name, experiment="triage", params={"r": "16"}, tags={})
    tracker.log_metrics(run, {"loss": 1.5}, step=1)
    assert again == run
    assert tracker.run(run).status == "running"
    assert tracker.history(run, "loss") == [(1, 1.5)]


def test_a_version_is_shown_once_with_its_tags(tracker: Tracker, name: str, artifact: Path) -> None:
    for number in (1, 2, 2, 1):
        tracker.put_version(TrackedVersion(name, number, artifact, tags={"flywheel.digest": f"d{number}"}))
    found = tracker.versions(name)
    assert sorted(found) == [1, 2]
    assert found[2]["flywheel.digest"] == "d2"


def test_aliases_point_to_our_numbers(tracker: Tracker, name: str, artifact: Path) -> None:
    run = tracker.begin_run(f"{name}-run", experiment="triage", params={}, tags={})
    for number in (1, 2):
        tracker.put_version(TrackedVersion(name, number, artifact, run=run))
    assert tracker.aliases(name) == {}
    tracker.put_alias(name, "champion", 1)
    tracker.put_alias(name, "canary", 2)
    tracker.put_alias(name, "champion", 2)
    tracker.put_alias(name, "champion", 2)
    assert tracker.aliases(name) == {"champion": 2, "canary": 2}


def test_what_cannot_be_is_refused_for_good(tracker: Tracker, name: str, artifact: Path) -> None:
    tracker.put_version(TrackedVersion(name, 1, artifact))
    for attempt in (
        lambda: tracker.put_alias(name, "champion", 7),
        lambda: tracker.aliases("never-registered"),
        lambda: tracker.end_run("no-such-run", "failed"),
    ):
        with pytest.raises(DependencyError) as caught:
            attempt()
        assert not caught.value.retryable
