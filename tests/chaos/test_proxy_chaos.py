"""Two clusters of one machine behind a HAProxy each: neither takes from the other, and a killed one comes back."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from app.bench.homes import beside
from cluster import environment
from cluster.models import obtain
from cluster.session import free_port
from cluster.storage import Home
from tests.processes import all_gone, of_home
from tests.serving import EMBEDDER

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

START_S = 120.0
BACK_S = 30.0
SERVER = """
import signal, sys
from cluster import environment
environment.prepare()
from app.pipelines import serve
from cluster.progress import silent
from cluster.session import connect
from cluster.storage import Home
from deployments.config import ServeConfig
config = ServeConfig.model_validate({
    "gateway": {"port": int(sys.argv[1]), "require_keys": False}, "embedding": {"model": sys.argv[2]},
})
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with connect(), serve.running(config, Home.current(), silent):
    signal.pause()
"""


@contextmanager
def serving(root: Path) -> Iterator[str]:
    """A cluster of its own in the home `root`, with an embedder; nothing of it is left afterwards."""
    port = free_port()
    kept = {name: value for name, value in os.environ.items() if name not in environment.library_settings_names()}
    env = {**kept, environment.HOME: str(root)}
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(port), EMBEDDER], env=env)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(90)
        assert not all_gone(root, within_s=20)


def haproxy_of(root: Path) -> psutil.Process:
    """The HAProxy that serves, of that home: an older one may be ending what it has begun."""
    found = [pid for pid, line in of_home(root).items() if "haproxy.cfg" in line and "bin/haproxy" in line]
    return psutil.Process(max(found))


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    return {tuple(each.laddr) for each in process.net_connections() if each.status == psutil.CONN_LISTEN}


def embed(url: str) -> httpx.Response | None:
    try:
        return httpx.post(f"{url}/v1/embeddings", json={"model": EMBEDDER, "input": "hello"}, timeout=60)
    except httpx.HTTPError:
        return None


def until_it_answers(url: str, within_s: float) -> list[httpx.Response | None]:
    """All answers up to the first good one."""
    deadline = time.monotonic() + within_s
    answers = []
    while True:
        answers.append(answer := embed(url))
        if answer is not None and answer.status_code == 200:
            return answers
        assert time.monotonic() < deadline, f"no answer within {within_s} s: {answer and answer.text}"
        time.sleep(0.1)


def test_two_clusters_share_a_machine(home: Home, tmp_path: Path) -> None:
    obtain(EMBEDDER, home)
    roots = [beside(home, tmp_path / name).root for name in ("one", "two")]  # what is signed for one home is for both
    with serving(roots[0]) as first, serving(roots[1]) as second:
        for url in (first, second):
            until_it_answers(url, START_S)
        for root, url in zip(roots, (first, second), strict=True):
            # No port for statistics, and nothing that a stranger can reach.
            assert listening(haproxy_of(root)) == {("127.0.0.1", int(url.rpartition(":")[2]))}

        killed = haproxy_of(roots[0])
        os.kill(killed.pid, signal.SIGKILL)
        refused = until_it_answers(first, BACK_S)[:-1]
        # A connection that is refused, and, while the new one looks for its gateways, a 503 that says so.
        assert {answer.status_code for answer in refused if answer is not None} <= {503}
        assert {answer.json()["error"]["code"] for answer in refused if answer is not None} <= {"overloaded"}
        assert haproxy_of(roots[0]).pid != killed.pid
        assert (answer := embed(second)) is not None
        assert answer.status_code == 200
