"""An application that is updated, scaled, hung and starved while requests flow. One engine start costs half a minute.

The tests go on from each other's application, in this order, to save starts; each can also be run alone.
"""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from ray import serve

from cluster import environment
from cluster.errors import ConfigError, DependencyError
from cluster.models import obtain
from deployments.config import ServeConfig
from tests.serving import BASE, ServeApp
from tests.traffic import flowing, story

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(420)]

TWO = {"replicas": 2}
START_S = 150.0
MORE_THAN_ONE_TAKES = 8, 400
"""Streams and tokens: below `routing.Affine.comfortable_tokens` all of one prompt would be on one replica."""


@pytest.fixture(scope="module")
def app(serve_app: ServeApp) -> Iterator[ServeApp]:
    """The session's application, which is put back as it was."""
    yield serve_app
    become(serve_app, {})


def become(app: ServeApp, llm: dict[str, Any], gateway: dict[str, Any] | None = None) -> None:
    """Deploy the session's settings with these changes of its first base; returns when all of it is there."""
    from deployments import application  # heavy

    settings = app.config.model_dump(mode="json")
    settings["llm"][0] |= llm
    settings["gateway"] |= gateway or {}
    application.run(ServeConfig.model_validate(settings))


def replicas(app: ServeApp) -> list[int]:
    """Processes of the engine's replicas."""
    return sorted(process.pid for process in psutil.process_iter() if _is_replica(process, app))


def _is_replica(process: psutil.Process, app: ServeApp) -> bool:
    try:
        # The deployment's name ends there, or at the method that the replica is busy with.
        title = " ".join(process.cmdline()).partition(".")[0].strip()
        named = title == f"ray::ServeReplica:{app.config.name}:llm"
        return named and process.environ().get(environment.HOME) == str(app.home.root)
    except psutil.Error:  # it has ended meanwhile, and perhaps nobody has fetched its status
        return False


def running(app: ServeApp) -> int:
    """Replicas of the engine that Serve sends requests to."""
    states = serve.status().applications[app.config.name].deployments["llm"].replica_states
    return int(states.get("RUNNING", 0))


def until(check: Callable[[], bool], within_s: float = START_S) -> float:
    """How long it took."""
    began = time.monotonic()
    while not check():
        assert time.monotonic() - began < within_s
        time.sleep(0.2)
    return time.monotonic() - began


def two_replicas(app: ServeApp) -> list[int]:
    if running(app) != 2:
        become(app, TWO)
    until(lambda: len(replicas(app)) == 2)
    return replicas(app)


def test_an_update_under_traffic_fails_nobody(app: ServeApp) -> None:
    before = replicas(app)
    with flowing(app, telling=2) as traffic:
        until(lambda: traffic.answered > 2)
        become(app, TWO)
        updated = traffic.answered
        until(lambda: traffic.answered > updated + 2)
        until(lambda: not set(before) & set(replicas(app)), within_s=90)
    print(f"update: {traffic.answered} answers, {traffic.whole} whole streams, failed: {traffic.failed}")  # noqa: T201
    assert traffic.failed == []
    assert traffic.whole >= 2
    assert len(replicas(app)) == 2


def test_a_bad_update_leaves_the_old_replicas_serving(app: ServeApp, tmp_path: Path) -> None:
    old = two_replicas(app)
    unsigned = tmp_path / BASE
    shutil.copytree(obtain(BASE, app.home).path, unsigned)
    weights = next(unsigned.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with flowing(app) as traffic:
        with pytest.raises(ConfigError, match="no model 'smollm3'"):  # seen before anything is touched
            become(app, {"model": "smollm3"})
        with pytest.raises(ConfigError, match="max_model_len 1000000"):
            become(app, {"max_model_len": 1_000_000})
        with pytest.raises(DependencyError, match="llm:") as caught:  # only a replica finds this out
            become(app, {"model": str(unsigned)})
        print(f"told: {caught.value.message}")  # noqa: T201
        failed = traffic.answered
        until(lambda: traffic.answered > failed + 5)
    print(f"bad update: {traffic.answered} answers, {traffic.whole} whole streams, failed: {traffic.failed}")  # noqa: T201
    assert traffic.failed == []
    assert set(old) <= set(replicas(app))


def test_a_good_update_mends_a_bad_one(app: ServeApp) -> None:
    with flowing(app) as traffic:
        become(app, {**TWO, "max_adapters": 8})
    assert traffic.failed == []
    assert app.http.get("/healthz").json()["llm"]["model"] == BASE
    until(lambda: len(replicas(app)) == 2)


def test_two_replicas_share_the_work_and_each_keeps_its_adapters(app: ServeApp) -> None:
    two_replicas(app)
    versions = [app.register(f"spread{number}", seed=number) for number in range(6)]
    until(lambda: f"{BASE}:{versions[-1].id}" in {model.id for model in app.sdk.models.list()})
    first = {version.id: app.say(f"{BASE}:{version.id}", max_tokens=4) for version in versions}
    time.sleep(3)  # both have reported
    for _ in range(3):
        assert {version.id: app.say(f"{BASE}:{version.id}", max_tokens=4) for version in versions} == first
    held = [holds(app) for _ in range(30)]
    by_replica = {tuple(each) for each in held}
    print(f"held: {by_replica}")  # noqa: T201
    assert len(by_replica) == 2
    a, b = (set(each) for each in by_replica)
    assert a | b >= {version.id for version in versions}
    assert not a & b & {version.id for version in versions}  # nobody was loaded twice
    assert min(len(a), len(b)) > 0


def holds(app: ServeApp) -> list[str]:
    """What one of the replicas holds; Serve chooses which is asked."""
    names = serve.get_deployment_handle("llm", app.config.name).engine_adapters.remote().result()
    return sorted(name.rpartition("@")[0] for name in names)


class Stories:
    """Several streams at once, and how and when each ended."""

    def __init__(self, app: ServeApp, number: int, tokens: int) -> None:
        self.ends: list[tuple[float, str]] = []
        self._app, self._tokens = app, tokens
        self._threads = [threading.Thread(target=self._one) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def _one(self) -> None:
        try:
            how = "whole" if story(self._app, self._tokens) else "cut"
        except openai.APIError as error:
            how = str(error.code)
        self.ends.append((time.monotonic(), how))

    def all(self) -> list[tuple[float, str]]:
        for thread in self._threads:
            thread.join()
        return self.ends


def test_one_of_two_is_killed_and_only_its_streams_break(app: ServeApp) -> None:
    victim = two_replicas(app)[0]
    stories = Stories(app, *MORE_THAN_ONE_TAKES)
    time.sleep(4)
    with flowing(app, telling=0) as traffic:
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        ends = stories.all()
    broken = [at - killed for at, how in ends if how != "whole"]
    print(f"killed: {[how for _, how in ends]}, told after {broken}; others: {traffic.failed}")  # noqa: T201
    assert {how for _, how in ends} == {"whole", "overloaded"}
    assert max(broken) < 2
    assert traffic.failed == []
    back = until(lambda: running(app) == 2 and victim not in replicas(app))
    print(f"two again after {back:.0f} s")  # noqa: T201


def test_one_of_two_hangs_and_nobody_waits_for_it(app: ServeApp) -> None:
    victim = two_replicas(app)[0]
    stories = Stories(app, *MORE_THAN_ONE_TAKES)
    time.sleep(4)
    with flowing(app, asking=2, telling=0) as traffic:
        os.kill(victim, signal.SIGSTOP)
        stopped = time.monotonic()
        ends = stories.all()
        hung = [at - stopped for at, how in ends if how != "whole"]
        print(f"hung: {[how for _, how in ends]}, told after {hung}; others: {traffic.failed}")  # noqa: T201
        assert {how for _, how in ends} == {"whole", "overloaded"}
        assert max(hung) < 15
        back = until(lambda: running(app) == 2 and victim not in replicas(app), within_s=200)
    print(f"two again after {back:.0f} s; others: {traffic.answered} answers, {traffic.failed}")  # noqa: T201
    assert len(traffic.failed) <= 2  # who was just sent there when it stopped


def test_replicas_follow_the_queue_up_and_down_and_no_stream_is_cut(app: ServeApp) -> None:
    scale = {"min": 1, "max": 2, "target_requests": 4, "upscale_delay_s": 1, "downscale_delay_s": 5}
    become(app, {"replicas": scale}, {"max_running": 4})
    until(lambda: running(app) == 1)
    began = time.monotonic()
    crowd = Stories(app, 24, 150)  # 4 run, 20 wait at the gateway, where Serve does not look
    up = until(lambda: serve.status().applications[app.config.name].deployments["llm"].status == "UPSCALING", 60)
    until(lambda: running(app) == 2)
    print(f"decided after {up:.0f} s, two after {time.monotonic() - began:.0f} s")  # noqa: T201
    ends = crowd.all()
    assert {how for _, how in ends} <= {"whole", "rate_limit_exceeded"}
    quiet = Stories(app, 2, 400)  # less than one replica is for: the other goes while these run
    down = until(lambda: running(app) == 1, within_s=120)
    print(f"one again after {down:.0f} s")  # noqa: T201
    assert {how for _, how in quiet.all()} == {"whole"}
