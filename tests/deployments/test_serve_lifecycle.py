"""What of the real application goes on while something beside it is away or slow."""

import threading
import time

import pytest
import ray

from actors.registry.client import RegistryClient
from actors.registry.config import ACTOR_NAME, NAMESPACE
from cluster.errors import ConfigError
from cluster.storage import only_one
from deployments import application
from deployments.llm.adapters import LOCK
from tests.serving import BASE, ServeApp
from tests.traffic import flowing

pytestmark = pytest.mark.serve


def until_listed(app: ServeApp, name: str) -> None:
    deadline = time.monotonic() + 30
    while name not in {model.id for model in app.sdk.models.list()}:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_serving_goes_on_without_the_registry_and_hears_of_it_again(serve_app: ServeApp) -> None:
    known = serve_app.register("survivor", seed=11)
    until_listed(serve_app, f"{BASE}:{known.id}")
    before = serve_app.say(f"{BASE}:{known.id}")
    with flowing(serve_app, tokens=20) as traffic:
        ray.kill(ray.get_actor(ACTOR_NAME, namespace=NAMESPACE), no_restart=True)
        deadline = time.monotonic() + 30
        while (health := serve_app.http.get("/healthz")).json()["registry"]["connected"]:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert (health.status_code, health.json()["status"]) == (200, "ok")
        assert serve_app.say(f"{BASE}:{known.id}") == before
        RegistryClient.start(serve_app.home)
        new = serve_app.register("survivor", seed=12)
        until_listed(serve_app, f"{BASE}:{new.id}")
        assert serve_app.say(f"{BASE}:{new.id}") != before
    assert traffic.failed == []
    assert serve_app.http.get("/healthz").json()["registry"]["connected"]


def test_an_adapter_that_comes_slowly_keeps_nobody_else_waiting(serve_app: ServeApp) -> None:
    slow = serve_app.register("slow", seed=13)
    until_listed(serve_app, f"{BASE}:{slow.id}")
    answers: list[str] = []
    waiting = threading.Thread(target=lambda: answers.append(serve_app.say(f"{BASE}:{slow.id}")))
    with only_one(serve_app.home.adapter_cache / LOCK):  # as a copy from a slow disk would hold it
        waiting.start()
        time.sleep(0.5)
        with flowing(serve_app, tokens=20) as traffic:
            time.sleep(2)
        assert answers == []
        assert traffic.failed == []
        assert traffic.answered >= 2
        assert traffic.whole >= 1
    waiting.join()
    assert answers[0] != serve_app.say(BASE)


def test_another_address_than_serves_own_is_refused_and_what_runs_runs_on(serve_app: ServeApp) -> None:
    gateway = serve_app.config.gateway
    elsewhere = gateway.model_copy(update={"port": gateway.port + 1})
    with pytest.raises(ConfigError, match=f"{gateway.port + 1} is not where .* at {gateway.host}:{gateway.port}"):
        application.run(serve_app.config.model_copy(update={"gateway": elsewhere}))
    assert serve_app.say(BASE)
