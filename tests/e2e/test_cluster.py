"""The README's commands for a Ray cluster that runs already: submit a job, deploy the application, look at both."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from actors.registry.reader import read_state
from cluster import environment
from cluster.storage import Home
from tests.e2e.conftest import ROOT, SMALL, clean_environment
from tests.processes import all_gone, of_home

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

# Beside the ports that Ray deals out to workers (10002-19999), and none that the tests' own Ray has by default.
GCS_PORT, DASHBOARD_PORT, AGENT_PORT, CLIENT_PORT, GATEWAY_PORT = range(26401, 26406)
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Cluster:
    """A cluster that `ray start --head` made, and the environment in which a user of it types."""

    home: Home
    env: dict[str, str]

    def run(self, *words: str, timeout_s: float = 600) -> str:
        """One command line, as a user would type it; its stdout."""
        done = subprocess.run(
            [str(BIN / words[0]), *words[1:]],
            cwd=ROOT,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout


@pytest.fixture
def cluster(fresh_home: Home, tmp_path: Path) -> Iterator[Cluster]:
    env = {
        **clean_environment(fresh_home),
        # The cluster's own token, as it would lie in its user's home folder.
        "HOME": str(tmp_path),
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }
    temp = Path("/tmp") / f"fw-{os.getpid()}"  # Ray's sockets need a short path
    made = Cluster(fresh_home, env)
    made.run(
        "ray", "start", "--head", f"--port={GCS_PORT}", f"--dashboard-port={DASHBOARD_PORT}", "--num-cpus=6",
        f"--dashboard-agent-listen-port={AGENT_PORT}", f"--ray-client-server-port={CLIENT_PORT}",
        f"--temp-dir={temp}", "--disable-usage-stats",
    )  # fmt: skip
    try:
        yield made
    finally:
        # `ray stop` would end every Ray of this machine, also other people's: only ours, by pid.
        for sign in (signal.SIGTERM, signal.SIGKILL):
            for pid in of_home(fresh_home.root):
                os.kill(pid, sign)
            all_gone(fresh_home.root, within_s=10)
        shutil.rmtree(temp, ignore_errors=True)


def test_a_job_trains_and_a_deployment_serves(cluster: Cluster, tmp_path: Path) -> None:
    dashboard = f"http://127.0.0.1:{DASHBOARD_PORT}"
    settings = [word for assignment in SMALL for word in ("--set", assignment)]
    printed = Cluster(cluster.home, {**cluster.env, environment.RAY_ADDRESS: dashboard}).run(
        "ray", "job", "submit", "--working-dir", ".", "--",
        "python", "-m", "app", "train", "app/recipes/error-triage.yaml", "--no-evaluate", *settings,
    )  # fmt: skip
    assert "succeeded" in printed

    state = read_state(cluster.home)
    (run,) = [event.fact for event in state.entries.values() if event.fact.event == "run"]
    assert state.run_status(run.id) == "completed"  # type: ignore[union-attr]

    port = f"serve.gateway.port={GATEWAY_PORT}"
    path = tmp_path / "serve.yaml"
    words = [word for setting in (port, "serve.gateway.require_keys=false") for word in ("--set", setting)]
    path.write_text(cluster.run("flywheel", "serve", "error-triage", "--print-config", *words))
    Cluster(cluster.home, {**cluster.env, "RAY_DASHBOARD_ADDRESS": dashboard}).run("serve", "deploy", str(path))
    url = f"http://127.0.0.1:{GATEWAY_PORT}"
    _wait_until_healthy(url)

    answer = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120).chat.completions.create(
        model="smollm2-135m-instruct", messages=[{"role": "user", "content": "Say hello."}], max_tokens=4
    )
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0

    attached = Cluster(cluster.home, {**cluster.env, environment.RAY_ADDRESS: f"127.0.0.1:{GCS_PORT}"})
    status = json.loads(attached.run("flywheel", "status", "--json"))
    assert status["applications"] == {"flywheel": "RUNNING"}
    assert status["cluster"]["nodes"] == 1
    assert [view["run"]["id"] for view in status["runs"]] == [run.id]  # type: ignore[union-attr]


def _wait_until_healthy(url: str, *, within_s: float = 300) -> None:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/healthz", timeout=5).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(1)
    pytest.fail(f"{url}/healthz was not healthy within {within_s:.0f} s")
