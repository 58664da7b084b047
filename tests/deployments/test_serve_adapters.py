"""What the real engine does with adapters: in, out, in use, hung up. The pure part: test_llm_residency.py."""

import concurrent.futures
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve

# No public call says what routers know. ray 2.60.0.
from ray.serve._private.common import DeploymentID
from ray.serve._private.long_poll import LongPollNamespace

from actors.registry.facts import Version, VersionFact
from cluster.models import obtain
from tests.adapters import write_adapter
from tests.serving import BASE, KEPT, TINY, ServeApp

pytestmark = pytest.mark.serve

HELLO: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
LONG = 450
"""Tokens of a stream that is to outlast what the test does meanwhile, on a fast machine too."""


def described(app: ServeApp) -> dict[str, Any]:
    return dict(app.http.get("/healthz").json()["llm"])


def engine_holds(app: ServeApp) -> list[str]:
    """Version ids, as vLLM's own memory has them; a slot without a name would show as `#id`."""
    names = serve.get_deployment_handle("llm", app.config.name).engine_adapters.remote().result()
    return sorted(name.rpartition("@")[0] or name for name in names)


def routers_know(app: ServeApp) -> list[str]:
    """Version ids that Serve's routers take to be on the replica: what the controller sends them."""
    key = (LongPollNamespace.DEPLOYMENT_TARGETS, DeploymentID("llm", app.config.name))
    controller = serve.context._get_global_client()._controller
    targets = ray.get(controller.listen_for_change.remote({key: -1}))[key].object_snapshot
    (replica,) = targets.running_replicas
    return sorted(name.rpartition("@")[0] for name in replica.routing_stats["resident"])


def tokens(answer: Any) -> int:
    return int(answer.usage.prompt_tokens)


def room(app: ServeApp) -> int:
    """Places for adapters that come and go."""
    return app.config.llm[0].max_adapters - len(described(app)["adapters_kept"])


def registered(app: ServeApp, name: str, count: int, *, rank: int = 8) -> list[Version]:
    made = [app.register(name, seed=time.time_ns() % 2**31, rank=rank) for _ in range(count)]
    until_listed(app, made[-1])
    return made


def until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def until_listed(app: ServeApp, version: Version) -> None:
    until(lambda: f"{BASE}:{version.id}" in {model.id for model in app.sdk.models.list()})


def test_what_is_said_to_be_resident_is_what_vllm_holds_and_eviction_frees_the_slot(serve_app: ServeApp) -> None:
    many = registered(serve_app, "cycled", room(serve_app) + 2)
    for version in many:
        serve_app.say(f"{BASE}:{version.id}", max_tokens=1)
        said = described(serve_app)["adapters"]
        assert version.id in said
        assert engine_holds(serve_app) == said
    assert said == sorted([version.id for version in many[2:]] + described(serve_app)["adapters_kept"])
    serve_app.say(f"{BASE}:{many[0].id}", max_tokens=1)
    assert many[2].id not in engine_holds(serve_app)
    until(lambda: routers_know(serve_app) == engine_holds(serve_app))


def test_more_at_once_than_there_are_slots_all_get_their_turn(serve_app: ServeApp) -> None:
    many = registered(serve_app, "crowded", room(serve_app) + 4)
    with concurrent.futures.ThreadPoolExecutor(len(many)) as pool:
        said = list(pool.map(lambda version: serve_app.say(f"{BASE}:{version.id}", max_tokens=6), many))
    assert all(said)
    assert engine_holds(serve_app) == described(serve_app)["adapters"]
    assert len(engine_holds(serve_app)) == room(serve_app) + len(described(serve_app)["adapters_kept"])


def test_what_a_stream_uses_is_not_evicted_and_what_was_hung_up_on_is(serve_app: ServeApp) -> None:
    used, left, *others = registered(serve_app, "streamed", room(serve_app) + 2)
    asked = {"messages": HELLO, "max_tokens": LONG, "stream": True, "ignore_eos": True, "temperature": 0}
    stream = serve_app.sdk.chat.completions.create(
        model=f"{BASE}:{used.id}", messages=HELLO, max_tokens=LONG, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    with serve_app.http.stream("POST", "/v1/chat/completions", json={**asked, "model": f"{BASE}:{left.id}"}) as broken:
        lines = broken.iter_lines()
        next(lines)
        assert described(serve_app)["running"] == 2
    for version in others:
        serve_app.say(f"{BASE}:{version.id}", max_tokens=1)
    held = engine_holds(serve_app)
    assert held == described(serve_app)["adapters"]
    assert used.id in held
    assert left.id not in held
    assert list(stream)[-1].choices[0].finish_reason == "length"


def test_ranks_may_differ_in_one_batch(serve_app: ServeApp) -> None:
    """Of the base that is so sure of its words that no batch changes one."""
    pair = [serve_app.register("ranked", seed=20 + rank, rank=rank, base=TINY) for rank in (4, 16)]
    models = [f"{TINY}:{version.id}" for version in pair]
    until(lambda: {model.id for model in serve_app.sdk.models.list()}.issuperset(models))
    alone = [serve_app.say(model, max_tokens=4) for model in models]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda model: serve_app.say(model, max_tokens=4), models))
    assert len({*alone, serve_app.say(TINY, max_tokens=4)}) == 3
    assert together == alone


def test_a_version_with_its_own_chat_template_is_asked_in_it(serve_app: ServeApp, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "own", obtain(BASE, serve_app.home).path, seed=time.time_ns() % 2**31, scale=0.05)
    (folder / "chat_template.jinja").write_text("Say {{ messages[0].content | upper }} again: ")
    own = serve_app.registry.register(VersionFact(name="own", kind="adapter", source_path=folder, base=BASE))
    (plain,) = registered(serve_app, "plain", 1)
    settings: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    chat = serve_app.sdk.chat.completions.create(model=f"{BASE}:{own.id}", messages=HELLO, **settings)
    text = serve_app.sdk.completions.create(
        model=f"{BASE}:{own.id}", prompt=f"Say {HELLO[0]['content'].upper()} again: ", **settings
    )
    assert chat.choices[0].message.content == text.choices[0].text
    assert tokens(chat) == tokens(text)
    for model in (BASE, f"{BASE}:{plain.id}"):
        other = serve_app.sdk.chat.completions.create(model=model, messages=HELLO, **settings)
        assert tokens(other) > tokens(chat)


@pytest.mark.parametrize("brought", [{"chat_template": "x"}, {"chat_template_kwargs": {"chat_template": "x"}}])
def test_a_client_cannot_bring_a_template(serve_app: ServeApp, brought: dict[str, Any]) -> None:
    answer = serve_app.http.post("/v1/chat/completions", json={"model": BASE, "messages": HELLO, **brought})
    assert answer.status_code == 400
    assert "chat_template" in answer.json()["error"]["param"]


def test_what_is_to_be_kept_is_brought_in_when_it_exists_and_stays(serve_app: ServeApp) -> None:
    if not serve_app.registry.list() or KEPT not in {model.name for model in serve_app.registry.list()}:
        assert KEPT in described(serve_app)["keep_problems"]
    version = serve_app.register(KEPT, seed=time.time_ns() % 2**31)
    serve_app.registry.promote(KEPT, "champion", version.number, why="to keep", force=True)
    until(lambda: described(serve_app)["adapters_kept"] == [version.id])
    until(lambda: version.id in described(serve_app)["adapters"])  # and nobody has asked for it
    assert not described(serve_app)["keep_problems"]
    for other in registered(serve_app, "passing", room(serve_app) + 1):
        serve_app.say(f"{BASE}:{other.id}", max_tokens=1)
    assert version.id in engine_holds(serve_app)
