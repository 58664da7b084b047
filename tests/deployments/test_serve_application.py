"""The whole application on real parts, asked by the official client."""

import concurrent.futures
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest

from actors.registry.facts import Version, VersionFact
from cluster.models import obtain
from cluster.signing import signature_path
from tests.adapters import write_adapter
from tests.processes import of_home
from tests.serving import BASE, EMBEDDER, MAX_LORA_RANK, MAX_MODEL_LEN, OUR_EMBEDDER, RERANKER, ServeApp

pytestmark = pytest.mark.serve

HELLO: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def versions(serve_app: ServeApp) -> list[Version]:
    """Two versions of one adapter; `champion` stands at the first, and the gateway knows it."""
    made = [serve_app.register("serving", seed=seed) for seed in (1, 2)]
    serve_app.registry.promote("serving", "champion", made[0].number, why="first", force=True)
    until(lambda: f"{BASE}:serving@champion" in names(serve_app))
    return made


def names(app: ServeApp) -> set[str]:
    return {model.id for model in app.sdk.models.list()}


def until(check: Callable[[], bool], *, wait_s: float = 30.0) -> None:
    deadline = time.monotonic() + wait_s
    while not check():
        assert time.monotonic() < deadline, f"not true within {wait_s} s"
        time.sleep(0.05)


def test_the_base_is_right(serve_app: ServeApp) -> None:
    assert "Paris" in serve_app.say(BASE)


def test_the_replica_was_checked_against_the_reference_before_it_was_ready(serve_app: ServeApp) -> None:
    health = serve_app.http.get("/healthz")
    assert health.status_code == 200
    (replica,) = health.json()["llm"]["replicas"]
    assert replica["parity"]["passed"] is True
    assert replica["digest"] == obtain(BASE, serve_app.home).digest


def test_an_adapter_answers_for_itself_and_says_which_version(serve_app: ServeApp, versions: list[Version]) -> None:
    response = serve_app.sdk.chat.completions.with_raw_response.create(
        model=f"{BASE}:serving@champion", messages=HELLO, max_tokens=12, temperature=0
    )
    answer = response.parse()
    assert (answer.model, answer.system_fingerprint) == (f"{BASE}:serving/1", "serving/1")
    assert response.headers["x-flywheel-version"] == "serving/1"
    said = {serve_app.say(BASE), str(answer.choices[0].message.content), serve_app.say(f"{BASE}:serving/2")}
    assert len(said) == 3


def test_a_stream_says_what_the_whole_answer_says(serve_app: ServeApp, versions: list[Version]) -> None:
    for model in (BASE, f"{BASE}:serving"):
        stream = serve_app.sdk.chat.completions.create(
            model=model,
            messages=HELLO,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == serve_app.say(model)
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("stop", "length")
        assert chunks[-1].usage is not None
        assert 1 <= chunks[-1].usage.completion_tokens <= 12


def test_base_requests_are_not_answered_by_an_adapter_in_a_mixed_batch(
    serve_app: ServeApp, versions: list[Version]
) -> None:
    for seed in (3, 4):  # so that every one of the engine's max_loras slots is taken
        version = serve_app.register("crowd", seed=seed)
    until(lambda: f"{BASE}:{version.id}" in names(serve_app))
    adapters = [f"{BASE}:{name}" for name in ("serving/1", "serving/2", "crowd/1", "crowd/2")]
    questions = ["What is the capital of France?", "What is two plus two?"]
    alone = {(model, q): serve_app.say(model, q) for model in [BASE, *adapters] for q in questions}
    jobs = [(model, q) for _ in range(3) for model in (BASE, *adapters, BASE) for q in questions]
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        together = list(pool.map(lambda job: serve_app.say(*job), jobs))
    base = [(job, said) for job, said in zip(jobs, together, strict=True) if job[0] == BASE]
    assert [said for _, said in base] == [alone[job] for job, _ in base]
    # An adapter of random weights sits on near ties, which another batch may turn; it must never be the base, though.
    assert not [job for job, said in zip(jobs, together, strict=True) if job[0] != BASE and said == alone[BASE, job[1]]]


def test_models_are_listed_with_parent_and_root(serve_app: ServeApp, versions: list[Version]) -> None:
    listed = {model.id: model.model_extra or {} for model in serve_app.sdk.models.list()}
    assert listed[BASE]["parent"] is None
    assert EMBEDDER in listed
    assert listed[f"{BASE}:serving@champion"] == {**listed[f"{BASE}:serving/1"]}
    assert listed[f"{BASE}:serving/1"]["parent"] == BASE
    assert listed[f"{BASE}:serving/1"]["root"] == f"{BASE}:serving/1"
    assert serve_app.sdk.models.retrieve(f"{BASE}:serving").id == f"{BASE}:serving"


def test_only_the_gateways_port_is_haproxys(serve_app: ServeApp) -> None:
    of_ours = [pid for pid, line in of_home(serve_app.home.root).items() if "bin/haproxy" in line]
    assert of_ours
    listening = {
        tuple(each.laddr)
        for pid in of_ours
        for each in psutil.Process(pid).net_connections()
        if each.status == psutil.CONN_LISTEN
    }
    assert listening == {("127.0.0.1", serve_app.config.gateway.port)}


def test_an_id_is_echoed_once(serve_app: ServeApp) -> None:
    mine = serve_app.http.get("/v1/models", headers={"x-request-id": "mine-1"})
    assert mine.headers.get_list("x-request-id") == ["mine-1"]
    assert len(serve_app.http.get("/v1/models").headers.get_list("x-request-id")) == 1


def test_embeddings_in_both_encodings_are_the_same_unit_vectors(serve_app: ServeApp) -> None:
    texts = ["open a file", "close a socket", "a much longer text about opening files and reading their lines"]
    base64 = serve_app.sdk.embeddings.create(model=EMBEDDER, input=texts)  # the SDK's default encoding
    floats = serve_app.sdk.embeddings.create(model=EMBEDDER, input=texts, encoding_format="float", dimensions=384)
    for one, other in zip(base64.data, floats.data, strict=True):
        np.testing.assert_allclose(one.embedding, other.embedding, atol=1e-5)
        assert np.linalg.norm(one.embedding) == pytest.approx(1, abs=1e-4)
    assert [one.index for one in floats.data] == [0, 1, 2]
    assert floats.usage.prompt_tokens == floats.usage.total_tokens > 12
    alone = serve_app.sdk.embeddings.create(model=EMBEDDER, input=texts[0])
    np.testing.assert_allclose(alone.data[0].embedding, floats.data[0].embedding, atol=1e-4)


def test_a_registered_embedder_answers_beside_it_with_prompts_and_shorter_vectors(serve_app: ServeApp) -> None:
    def ask(**more: Any) -> Any:
        return serve_app.sdk.embeddings.with_raw_response.create(model=OUR_EMBEDDER, input=["read a file"], **more)

    plain, query = ask(), ask(extra_body={"input_type": "query"})
    assert plain.headers["x-flywheel-version"].startswith(f"{OUR_EMBEDDER}/")
    assert len(plain.parse().data[0].embedding) == 32
    assert plain.parse().data[0].embedding != query.parse().data[0].embedding
    whole, short = (np.array(one.parse().data[0].embedding) for one in (plain, ask(dimensions=8)))
    np.testing.assert_allclose(short, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-5)
    with pytest.raises(openai.BadRequestError, match="it has 32, 8"):
        ask(dimensions=16)
    checks = serve_app.http.get("/healthz").json()
    assert checks[f"embedding-{OUR_EMBEDDER}"]["dimensions_offered"] == [32, 8]


def test_tokens_and_scores(serve_app: ServeApp, versions: list[Version]) -> None:
    counted = serve_app.sdk.chat.completions.create(model=BASE, messages=HELLO, max_tokens=1).usage
    for model in (BASE, f"{BASE}:serving"):
        made = serve_app.http.post("/tokenize", json={"model": model, "messages": HELLO}).json()
        assert counted is not None
        assert made["count"] == len(made["tokens"]) == counted.prompt_tokens
        assert made["max_model_len"] == MAX_MODEL_LEN
    refused = serve_app.http.post("/detokenize", json={"model": BASE, "tokens": ["x"]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_value")
    scored = serve_app.http.post(
        "/v1/score",
        json={"model": EMBEDDER, "queries": "open a file", "documents": ["read a file", "bake a cake"]},
    ).json()
    near, far = (row["score"] for row in scored["data"])
    assert 1 > near > far


def test_documents_are_ranked(serve_app: ServeApp) -> None:
    asked = {"model": RERANKER, "query": "read the file", "documents": ["sort a list", "parse the value", "return"]}
    ranked = serve_app.http.post("/v1/rerank", json=asked).json()["results"]
    scores = [one["relevance_score"] for one in ranked]
    assert sorted(one["index"] for one in ranked) == [0, 1, 2]
    assert 1 > scores[0] > scores[1] > scores[2] > 0
    best = serve_app.http.post("/v1/rerank", json={**asked, "documents": [asked["documents"][ranked[0]["index"]]]})
    assert best.json()["results"][0]["relevance_score"] == pytest.approx(scores[0], abs=1e-5)
    refused = serve_app.http.post("/v1/rerank", json={**asked, "documents": ["sort", "value " * 99]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents[1]")


def test_documents_are_found_again(serve_app: ServeApp) -> None:
    written = serve_app.http.post(
        "/v1/collections/serving/documents",
        json={
            "documents": [
                {"id": "a", "text": "def read_lines(path): open the file and return its lines", "metadata": {"n": 1}},
                {"id": "b", "text": "def multiply(a, b): the product of two matrices", "metadata": {"n": 2}},
            ]
        },
    )
    assert (written.status_code, written.json()["written"]) == (200, 2)
    found = serve_app.http.post("/v1/collections/serving/search", json={"query": "matrix product", "k": 2}).json()[
        "data"
    ]
    assert [hit["id"] for hit in found] == ["b", "a"]
    assert found[0]["metadata"] == {"n": 2}
    assert found[0]["score"] > found[1]["score"]
    assert serve_app.http.post("/v1/collections/nowhere/search", json={"query": "x"}).status_code == 404


def test_a_broken_adapter_fails_alone(serve_app: ServeApp, tmp_path: Path) -> None:
    # Bytes that this node has never seen, also where the home folder is kept between sessions.
    lost = serve_app.register("lost", seed=time.time_ns())
    shutil.rmtree(serve_app.home.versions / lost.path)  # before any replica has seen it
    wrong = write_adapter(tmp_path / "wrong", obtain(BASE, serve_app.home).path, seed=8, width=96)
    misfit = serve_app.registry.register(VersionFact(name="misfit", kind="adapter", source_path=wrong, base=BASE))
    until(lambda: {f"{BASE}:{lost.id}", f"{BASE}:{misfit.id}"} <= names(serve_app))
    unsigned = serve_app.register("unsigned", seed=time.time_ns())
    signature_path(serve_app.home.versions / unsigned.path).unlink()
    large = serve_app.register("large", seed=9, rank=2 * MAX_LORA_RANK)
    until(lambda: {f"{BASE}:{large.id}", f"{BASE}:{unsigned.id}"} <= names(serve_app))
    for version, status in ((lost, 503), (unsigned, 503), (misfit, 422), (large, 422)):
        for stream in (False, True):
            with pytest.raises(openai.APIStatusError) as caught:
                serve_app.sdk.chat.completions.create(
                    model=f"{BASE}:{version.id}", messages=HELLO, stream=stream, max_tokens=4
                )
            assert caught.value.status_code == status
            assert str(serve_app.home.root) not in caught.value.message
            assert "Traceback" not in caught.value.message
        failed = serve_app.http.get("/healthz").json()["llm"]["adapters_failed"]
        assert version.id in failed[version.id]["why"]
        assert str(serve_app.home.root) not in failed[version.id]["why"]
    assert "Paris" in serve_app.say(BASE)


def test_adapters_outlive_their_source_and_their_eviction(serve_app: ServeApp, versions: list[Version]) -> None:
    many = [serve_app.register("many", seed=100 + n) for n in range(serve_app.config.llm[0].max_adapters + 1)]
    until(lambda: f"{BASE}:{many[-1].id}" in names(serve_app))
    first = serve_app.say(f"{BASE}:{many[0].id}", max_tokens=4)
    shutil.rmtree(serve_app.home.versions / many[0].path)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda version: serve_app.say(f"{BASE}:{version.id}", max_tokens=1), many[1:]))
    assert serve_app.say(f"{BASE}:{many[0].id}", max_tokens=4) == first


def test_a_stream_ends_on_the_version_that_it_began_with(serve_app: ServeApp, versions: list[Version]) -> None:
    stream = serve_app.sdk.chat.completions.create(
        model=f"{BASE}:serving",
        messages=HELLO,
        max_tokens=80,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    first = next(stream)
    serve_app.registry.promote("serving", "champion", 2, why="second", force=True)
    until(lambda: serve_app.sdk.models.retrieve(f"{BASE}:serving").model_extra["root"].endswith("/2"))  # type: ignore[index]
    assert serve_app.say(f"{BASE}:serving") == serve_app.say(f"{BASE}:serving/2")
    rest = list(stream)
    assert {chunk.model for chunk in (first, *rest)} == {f"{BASE}:serving/1"}
    assert rest[-1].choices[0].finish_reason == "length"
    serve_app.registry.rollback("serving", "champion", why="as it was")
    until(lambda: serve_app.sdk.models.retrieve(f"{BASE}:serving").model_extra["root"].endswith("/1"))  # type: ignore[index]


def test_the_registry_may_die_while_requests_go_on(serve_app: ServeApp, versions: list[Version]) -> None:
    known = {version.id for model in serve_app.registry.list() for version in model.versions}
    stop, answers, failures = threading.Event(), [], []

    def keep_asking() -> None:
        while not stop.is_set():
            try:
                answers.append(serve_app.say(f"{BASE}:serving@champion", max_tokens=4))
            except openai.APIError as error:
                failures.append(error)

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        until(lambda: bool(answers))
        before = len(answers)
        os.kill(serve_app.registry.pid(), signal.SIGKILL)
        until(lambda: len(answers) >= before + 2)
        assert {version.id for model in serve_app.registry.list() for version in model.versions} == known
        move = serve_app.registry.promote("serving", "candidate", 2, why="after the restart", force=True)
        assert move.version == 2
        until(lambda: f"{BASE}:serving@candidate" in names(serve_app))
    finally:
        stop.set()
        asking.join()
    assert not failures


def test_what_was_served_by_whom_is_in_the_lineage(serve_app: ServeApp, versions: list[Version]) -> None:
    serve_app.say(f"{BASE}:serving/1")

    def came_of_it() -> dict[str, str]:
        return {link.kind: link.note for link in serve_app.registry.lineage("serving/1")}

    until(lambda: {"replica", "traffic"} <= came_of_it().keys(), wait_s=45)
    assert "serving/1 since" in came_of_it()["replica"]
    assert "requests" in came_of_it()["traffic"]


def test_metrics_name_routes_models_and_tokens(serve_app: ServeApp) -> None:
    serve_app.say(BASE)
    counted = (
        f'flywheel_gateway_requests_total{{model="{BASE}",route="/v1/chat/completions",status="200"}}',
        f'flywheel_gateway_tokens_total{{direction="completion",model="{BASE}"}}',
    )

    def told() -> bool:
        text = serve_app.http.get("/metrics").text
        return all(series in text for series in counted)

    until(told)  # a request is counted once its answer has gone


def test_the_context_is_the_one_that_was_asked_for(serve_app: ServeApp) -> None:
    card = serve_app.sdk.models.retrieve(BASE).model_extra or {}
    assert card["max_model_len"] == MAX_MODEL_LEN
