"""What every `deployments.gateway.ports.Engine` does: the shipped fake, and the real one behind its Serve handle."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cluster.errors import FlywheelError
from deployments.gateway.echo import EchoEngine
from deployments.gateway.ports import Engine
from deployments.llm.protocol import Adapter, Generation
from tests.serving import BASE, ServeApp

Ask = Callable[..., Generation]


def echo(request: pytest.FixtureRequest) -> Engine:
    return EchoEngine(pause_s=0.01)


def vllm(request: pytest.FixtureRequest) -> Engine:
    from ray import serve

    from deployments.gateway.handles import EngineHandle
    from deployments.gateway.placement import Dispatcher

    app: ServeApp = request.getfixturevalue("serve_app")
    return EngineHandle(serve.get_deployment_handle("llm", app.config.name), Dispatcher(), base=BASE)


@pytest.fixture(params=[echo, pytest.param(vllm, marks=pytest.mark.serve)])
def engine(request: pytest.FixtureRequest) -> Engine:
    made: Engine = request.param(request)
    return made


@pytest.fixture
def ask() -> Ask:
    numbers = iter(range(1000))

    def generation(kind: Any = "chat", **body: Any) -> Generation:
        usual: dict[str, Any] = (
            {"messages": [{"role": "user", "content": "say some words to me"}]}
            if kind == "chat"
            else {"prompt": "one two"}
        )
        return Generation(kind, {**usual, "max_tokens": 8, "temperature": 0, **body}, f"contract-{next(numbers)}")

    return generation


def chunks(pieces: list[Any]) -> list[dict[str, Any]]:
    text = b"".join(pieces).decode()
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


@pytest.mark.parametrize("kind", ["chat", "completions"])
async def test_without_stream_there_is_one_whole_answer(engine: Engine, ask: Ask, kind: str) -> None:
    answers = [answer async for answer in engine.generate(ask(kind))]
    assert len(answers) == 1
    assert isinstance(answers[0], dict)
    choice = answers[0]["choices"][0]
    assert choice["finish_reason"] in ("stop", "length")
    assert choice["message"]["content"] if kind == "chat" else choice["text"]
    usage = answers[0]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0


@pytest.mark.parametrize("kind", ["chat", "completions"])
async def test_a_stream_is_events_that_end_with_a_finish_usage_and_done(engine: Engine, ask: Ask, kind: str) -> None:
    generation = ask(kind, stream=True, stream_options={"include_usage": True})
    made = chunks([answer async for answer in engine.generate(generation)])
    finishes = [choice["finish_reason"] for chunk in made for choice in chunk["choices"]]
    assert finishes[-1] in ("stop", "length")
    assert not any(finishes[:-1])
    assert made[-1]["choices"] == []
    assert made[-1]["usage"]["completion_tokens"] >= 1


async def test_a_stream_that_is_left_early_can_be_closed(engine: Engine, ask: Ask) -> None:
    answers = engine.generate(ask(stream=True))
    async with asyncio.timeout(60):
        assert await anext(answers)
        await answers.aclose()  # type: ignore[attr-defined]


async def test_an_adapter_that_is_not_there_is_an_error_before_the_first_answer(engine: Engine, ask: Ask) -> None:
    if isinstance(engine, EchoEngine):
        pytest.skip("the fake needs no files")
    gone = Generation("chat", ask().body, "contract-gone", Adapter("gone/1", "/nowhere", "0" * 64))
    with pytest.raises(FlywheelError):
        await anext(engine.generate(gone))


async def test_tokens_of_a_text_are_the_text_again(engine: Engine, ask: Ask) -> None:
    text = "Hé, one two"
    made = await anext(engine.generate(replace(ask(), kind="tokenize", body={"prompt": text})))
    assert isinstance(made, dict)
    assert made["count"] == len(made["tokens"]) > 0
    back = await anext(engine.generate(replace(ask(), kind="detokenize", body={"tokens": made["tokens"]})))
    assert isinstance(back, dict)
    assert back["prompt"] == text


async def test_it_describes_itself(engine: Engine) -> None:
    assert (await engine.describe())["model"]
