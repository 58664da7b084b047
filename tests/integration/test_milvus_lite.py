"""The owner of Milvus Lite under the faults that happen: killed servers, killed owners, two users at once."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray

from cluster.errors import DependencyError
from cluster.session import Session
from cluster.storage import Home
from cluster.vectors import (
    CollectionSpec,
    Fingerprint,
    MilvusLiteServer,
    MilvusVectors,
    Record,
    lite_process,
    lite_server,
    open_store,
)

pytestmark = pytest.mark.integration

DIMENSION = 16
MODEL = Fingerprint("tiny", "a" * 64, DIMENSION, normalized=True)
PROJECT = Path(__file__).parents[2]


def rows(first: int, count: int) -> list[Record]:
    vectors = np.random.default_rng(first).normal(size=(count, DIMENSION)).astype(np.float32)
    # Long enough that a few thousand rows go through several of the server's files.
    return [Record(f"{first + i:06d}", vectors[i], "text " * 100, {"n": first + i}) for i in range(count)]


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def lite(tmp_path: Path) -> Iterator[MilvusLiteServer]:
    server = MilvusLiteServer(str(tmp_path / "data"), str(tmp_path / "lite.log"), lock_wait_s=2)
    yield server
    server.stop()


def test_kill_9_in_the_middle_of_writing_loses_nothing_acknowledged(lite: MilvusLiteServer) -> None:
    store = MilvusVectors(lite.uri)
    store.create(CollectionSpec("functions", MODEL))
    acknowledged: list[Record] = []
    killed: list[int] = []

    def kill() -> None:
        for enough in (600, 1400):
            until(lambda enough=enough: len(acknowledged) >= enough)  # type: ignore[misc]
            pid = lite.pid()
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    killer = threading.Thread(target=kill)
    killer.start()
    first = 0
    while killer.is_alive() or first < 2000:
        batch = rows(first, 50)
        store.upsert("functions", batch)
        acknowledged += batch
        first += 50
    killer.join()
    assert len(set(killed)) == 2
    assert store.count("functions") == len(acknowledged)
    probes = acknowledged[:: len(acknowledged) // 20]
    found = store.search("functions", np.stack([row.vector for row in probes]), k=1)
    assert [matches[0].id for matches in found] == [row.id for row in probes]
    assert store.describe("functions").fingerprint == MODEL


def test_stopping_in_order_keeps_everything_and_the_next_call_starts_again(lite: MilvusLiteServer) -> None:
    store = MilvusVectors(lite.uri)
    store.create(CollectionSpec("functions", MODEL))
    store.upsert("functions", rows(0, 100))
    first = lite.pid()
    assert first is not None
    lite.stop()
    assert gone(first)
    assert lite.pid() is None
    assert store.count("functions") == 100
    assert lite.pid() not in (None, first)


def test_a_folder_in_use_is_refused_and_its_user_left_alone(lite: MilvusLiteServer, tmp_path: Path) -> None:
    lite.uri()
    second = MilvusLiteServer(str(tmp_path / "data"), str(tmp_path / "second.log"), lock_wait_s=1)
    with pytest.raises(DependencyError, match=f"pid {lite.pid()}") as caught:
        second.uri()
    assert not caught.value.retryable
    assert "FLYWHEEL_HOME" in (caught.value.hint or "")
    assert second.pid() is None
    assert MilvusVectors(lite.uri).list() == []


def test_an_orphan_of_a_dead_owner_is_ended(lite: MilvusLiteServer, tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", ""])
    identity = f"{owner.pid}:{psutil.Process(owner.pid).create_time():.2f}"
    owner.wait()
    # Its lifeline is held by this test, so it would stay: like a server that hangs.
    orphan = subprocess.Popen(
        [sys.executable, "-P", lite_process.__file__, "--data-dir", str(tmp_path / "data"), "--owner", identity],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert orphan.stdout is not None
    assert b"port" in orphan.stdout.readline()
    assert MilvusVectors(lite.uri).list() == []
    assert orphan.wait(timeout=5) == -signal.SIGKILL


def test_a_lock_file_that_nobody_holds_does_not_matter(lite: MilvusLiteServer, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "LOCK").touch()
    assert MilvusVectors(lite.uri).list() == []


def test_a_server_that_cannot_start_says_where_its_log_is(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "collections").write_text("not a folder")
    server = MilvusLiteServer(str(tmp_path / "data"), str(tmp_path / "lite.log"))
    with pytest.raises(DependencyError, match="did not start") as caught:
        server.uri()
    assert str(tmp_path / "lite.log") in (caught.value.hint or "")
    assert "FileExistsError" in (tmp_path / "lite.log").read_text()


@pytest.fixture
def collection(ray_session: Session, home: Home) -> Iterator[str]:
    store = open_store(None, home)
    store.create(CollectionSpec("faults", MODEL))
    yield "faults"
    store.drop("faults")


def test_kill_9_of_the_owner_ends_the_server_and_both_come_back(home: Home, collection: str) -> None:
    store = open_store(None, home)
    store.upsert(collection, rows(0, 200))
    actor = lite_server(home)
    server = ray.get(actor.pid.remote())
    owner = psutil.Process(server).ppid()
    os.kill(owner, signal.SIGKILL)
    assert until(lambda: gone(server))
    store.upsert(collection, rows(200, 100))
    assert store.count(collection) == 300
    assert ray.get(actor.pid.remote()) not in (None, server)


def test_processes_at_once_share_one_server_and_see_each_other(home: Home, collection: str) -> None:
    class Writer:
        """An actor each, because an actor is a process of its own; Ray may run two tasks in one."""

        def write(self, first: int) -> int:
            store = open_store(None, Home(home.root))
            for start in range(first, first + 300, 50):
                store.upsert(collection, rows(start, 50))
                (found,) = store.search(collection, np.stack([rows(start, 50)[7].vector]), k=1)
                assert found[0].id == f"{start + 7:06d}"
            return os.getpid()

    writers = [ray.remote(Writer).options(num_cpus=1).remote() for _ in range(3)]
    pids = ray.get([writer.write.remote(1000 * place) for place, writer in enumerate(writers)])
    assert len(set(pids)) == 3
    assert open_store(None, home).count(collection) == 900


def test_nothing_is_left_running_when_ray_ends(tmp_path: Path) -> None:
    script = """
import ray
from cluster import environment
environment.prepare()
from cluster.session import connect
from cluster.storage import Home
from cluster.vectors import lite_server, open_store
with connect(num_cpus=1):
    open_store(None, Home.current()).list()
    print(ray.get(lite_server(Home.current()).pid.remote()))
"""
    environment = {**os.environ, "FLYWHEEL_HOME": str(tmp_path), "PYTHONPATH": str(PROJECT)}
    environment.pop("RAY_ADDRESS", None)
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    server = int(ended.stdout.split()[-1])
    assert until(lambda: gone(server), timeout_s=10)
