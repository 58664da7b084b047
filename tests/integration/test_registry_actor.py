"""The registry as an actor in real Ray: what `kill -9` of its process costs, and what it must not cost."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import ray
from mlflow import MlflowClient
from safetensors.numpy import save_file

from actors.registry.client import RegistryClient, RegistryHandle
from actors.registry.config import ACTOR_NAME, NAMESPACE
from actors.registry.facts import GateEnded, RunFact, VersionFact
from actors.registry.snapshot import Snapshot, resolve
from cluster.errors import DependencyError, RequestError, StateError
from cluster.progress import Progress
from cluster.session import Session
from cluster.signing import verify
from cluster.storage import Home, digest_folder
from cluster.tracking import MlflowTracker, prepare_tracking

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
MUST_BE_BACK_WITHIN_S = 10.0


@pytest.fixture
def registry(ray_session: Session, home: Home) -> RegistryClient:
    return RegistryClient.start(home, by="tester")


def adapter(folder: Path, *, seed: int = 0, rank: int = 4, width: int = 8) -> Path:
    """A LoRA adapter of `rank` × `width` floats a matrix."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "base_model_name_or_path": "b", "r": rank, "lora_alpha": 8, "target_modules": ["q"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = np.random.default_rng(seed).standard_normal((rank, width), dtype=np.float32)
    save_file(
        {"m.q.lora_A.weight": weights, "m.q.lora_B.weight": weights.T.copy()}, folder / "adapter_model.safetensors"
    )
    return folder


def fact(name: str, source: Path) -> VersionFact:
    return VersionFact(name=name, kind="adapter", source_path=source, base="smollm2-135m-instruct")


def kill(registry: RegistryClient) -> int:
    """`kill -9` of the actor's process; its pid."""
    pid = registry.pid()
    os.kill(pid, signal.SIGKILL)
    return pid


def test_nothing_acknowledged_is_lost_when_its_process_is_killed(
    registry: RegistryClient, home: Home, tmp_path: Path
) -> None:
    for number in (1, 2):
        registry.register(fact("killed", adapter(tmp_path / str(number), seed=number)))
    registry.promote("killed", "champion", 1, why="first", force=True)
    registry.promote("killed", "champion", 2, why="better", expected=1, force=True)
    before, epoch = registry.snapshot(), registry.status().epoch

    dead = kill(registry)
    killed_at = time.monotonic()
    after = registry.snapshot()
    assert time.monotonic() - killed_at < MUST_BE_BACK_WITHIN_S
    assert (after.models, after.number) == (before.models, before.number)
    status = registry.status()
    assert status.pid != dead
    assert status.epoch == epoch + 1
    route = resolve(after, "killed@champion")
    assert route.version == 2
    assert digest_folder(after.folder(route)) == route.digest

    move = registry.rollback("killed", "champion", why="worse after all")
    assert (move.previous, move.version, move.by) == (2, 1, "tester")
    assert registry.wait_mirrored(60)
    tracker = MlflowTracker(prepare_tracking(home))
    assert tracker.aliases("killed") == {"champion": 1}
    assert {number: tags["flywheel.digest"] for number, tags in tracker.versions("killed").items()} == {
        number: after.models["killed"].versions[number].digest for number in (1, 2)
    }


def test_moves_made_while_it_is_killed_again_and_again_happen_once_each_and_in_order(
    registry: RegistryClient, tmp_path: Path
) -> None:
    for number in (1, 2):
        registry.register(fact("busy", adapter(tmp_path / str(number), seed=10 + number)))
    acknowledged: list[str] = []
    stop = threading.Event()

    def mover() -> None:
        while not stop.is_set():
            why = f"move {len(acknowledged)}"
            registry.promote("busy", "champion", 1 + len(acknowledged) % 2, why=why, force=True)
            acknowledged.append(why)

    thread = threading.Thread(target=mover)
    thread.start()
    for _ in range(2):
        count = len(acknowledged)
        while len(acknowledged) < count + 5:
            time.sleep(0.01)
        kill(registry)
    count = len(acknowledged)
    while len(acknowledged) < count + 5:
        time.sleep(0.01)
    stop.set()
    thread.join(timeout=60)
    assert not thread.is_alive()
    moves = [entry.why for entry in registry.history("busy") if entry.alias == "champion"]
    assert moves == acknowledged


def test_a_registration_whose_process_is_killed_in_the_middle_of_its_copy_goes_on_from_there(
    registry: RegistryClient, home: Home, ray_session: Session, tmp_path: Path
) -> None:
    source = adapter(tmp_path / "big", rank=256, width=200_000)  # 410 MB
    with driver(ray_session, f"registry.register({fact('big', source)!r})") as dying:
        store = home.versions / "big"
        while not any("\n" in journal.read_text() for journal in store.glob(".partial-upload-*/journal")):
            assert dying.poll() is None
            time.sleep(0.002)
        dying.kill()
    assert [model.name for model in registry.list() if model.name == "big"] == []
    heard: list[Progress] = []
    version = registry.register(fact("big", source), sink=heard.append)
    assert version.id == "big/1"
    assert digest_folder(home.versions / version.path) == version.digest
    assert verify(home.versions / version.path, home, what=version.id, digest=version.digest)
    assert [path.name for path in store.iterdir() if path.name.startswith(".partial")] == []
    assert heard[0].done > 0


def driver(session: Session, call: str) -> "subprocess.Popen[str]":
    """Another Ray driver that makes one call of the registry's client."""
    script = f"""
import sys
from pathlib import Path, PosixPath
from cluster import environment; environment.prepare()
from cluster.session import connect
with connect(sys.argv[1]):
    from actors.registry.client import RegistryClient
    from actors.registry.facts import VersionFact
    registry = RegistryClient.connect()
    {call}
"""
    return subprocess.Popen(
        [sys.executable, "-c", script, session.address], cwd=ROOT, text=True, stdout=subprocess.PIPE
    )


def test_two_drivers_that_register_the_same_content_at_once_get_the_same_version(
    registry: RegistryClient, tmp_path: Path
) -> None:
    sources = [adapter(tmp_path / name, seed=77) for name in ("a", "b")]

    def register(client: RegistryClient, source: Path) -> str:
        return client.register(fact("twice", source)).id

    # The client travels into the tasks, as it does into a training worker.
    task = ray.remote(register)
    assert ray.get([task.remote(registry, source) for source in sources]) == ["twice/1", "twice/1"]


async def test_a_server_that_waits_for_news_gets_them_across_a_death(registry: RegistryClient, tmp_path: Path) -> None:
    await asyncio.to_thread(registry.register, fact("pushed", adapter(tmp_path / "a", seed=5)))
    handle = RegistryHandle()

    async def news() -> Snapshot:
        known = await handle.snapshot()
        while not known.aliases_of("pushed"):  # a new life of the registry is news, too
            known = await handle.wait_snapshot(known, 50)
        return known

    waiting = asyncio.create_task(news())
    await asyncio.sleep(0.3)
    await asyncio.to_thread(kill, registry)
    await asyncio.to_thread(registry.promote, "pushed", "champion", 1, why="news", force=True)
    promoted_at = time.monotonic()
    assert resolve(await waiting, "pushed").version == 1
    assert time.monotonic() - promoted_at < 2


def test_a_run_whose_driver_died_does_not_stay_running(registry: RegistryClient, ray_session: Session) -> None:
    driver = """
import os, sys
from cluster import environment; environment.prepare()
from cluster.session import connect
with connect(sys.argv[1]):
    from actors.registry.client import RegistryClient
    from actors.registry.facts import RunFact
    RegistryClient.connect().begin_run(RunFact(id="orphan-1", name="orphan", base="b", base_digest=""))
    os._exit(1)
"""
    ended = subprocess.run(
        [sys.executable, "-c", driver, ray_session.address],
        cwd=ROOT,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1, ended.stderr
    ours = registry.begin_run(RunFact(id="ours-1", name="ours", base="b", base_digest=""))
    assert ours.driver is not None
    deadline = time.monotonic() + 30
    while registry.run("orphan-1").status == "running" and time.monotonic() < deadline:
        time.sleep(0.5)
    orphan = registry.run("orphan-1")
    assert orphan.status == "stopped"
    assert "without reporting" in orphan.verdict
    assert registry.run("ours-1").status == "running"


def test_a_move_in_mlflows_own_registry_is_followed_or_put_back_and_kept_as_what_it_was(
    registry: RegistryClient, home: Home, tmp_path: Path
) -> None:
    for number in (1, 2, 3):
        registry.register(fact("foreign", adapter(tmp_path / str(number), seed=50 + number)))
    gate = registry.begin_gate("foreign/2")
    registry.end_gate(GateEnded(gate_id=gate.id, outcome="passed"))
    registry.promote("foreign", "champion", 1, why="first", force=True)
    assert registry.wait_mirrored(60)
    mlflow = MlflowClient(prepare_tracking(home))

    mlflow.set_registered_model_alias("foreign", "champion", "2")
    until(lambda: registry.snapshot().aliases_of("foreign") == {"champion": 2})
    mlflow.set_registered_model_alias("foreign", "champion", "3")
    until(lambda: registry.history("foreign")[-1].what == "external refused")
    until(lambda: int(mlflow.get_model_version_by_alias("foreign", "champion").version) == 2)
    *_, followed, refused = registry.history("foreign")
    assert (followed.what, followed.by, followed.previous, followed.version) == ("external", "mlflow", 1, 2)
    assert (refused.what, refused.version) == ("external refused", 3)
    assert "is candidate" in refused.why
    assert mlflow.get_model_version("foreign", "2").tags["flywheel.stage"] == "promoted"

    mlflow.delete_registered_model("foreign")
    tracker = MlflowTracker(prepare_tracking(home))
    until(lambda: sorted(tracker.versions("foreign")) == [1, 2, 3] and tracker.aliases("foreign") == {"champion": 2})


def until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_errors_arrive_as_themselves(registry: RegistryClient, home: Home) -> None:
    with pytest.raises(RequestError) as caught:
        registry.show("kiled")
    assert type(caught.value) is RequestError
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    with pytest.raises(StateError, match="belongs to"):
        RegistryClient.start(Home(home.root / "elsewhere"))


def test_a_registry_that_cannot_start_says_why_and_the_next_one_finds_everything(
    registry: RegistryClient, home: Home, tmp_path: Path
) -> None:
    registry.register(fact("kept", adapter(tmp_path / "a", seed=9)))
    before = registry.snapshot()
    ray.kill(ray.get_actor(ACTOR_NAME, namespace=NAMESPACE), no_restart=True)
    (tmp_path / "file").touch()
    with pytest.raises(DependencyError, match=r"cannot start: .*cannot be created"):
        RegistryClient.start(home, database=f"sqlite:///{tmp_path}/file/registry.db")
    assert RegistryClient.start(home).snapshot().models == before.models
