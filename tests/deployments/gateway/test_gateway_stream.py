import json
from typing import Any

import pytest

from cluster.errors import RequestError
from deployments.gateway.stream import DONE, StreamAssembler


def chunk(text: str = "", *, index: int = 0, finish: str | None = None) -> str:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": finish}
    return f"data: {json.dumps({'id': 'x', 'model': 'engine-name', 'choices': [choice]})}\n\n"


USAGE = f"data: {json.dumps({'id': 'x', 'choices': [], 'usage': {'prompt_tokens': 4, 'completion_tokens': 2}})}\n\n"
WHOLE = chunk("Hé") + chunk("llo", finish="stop") + USAGE + DONE


def assembler(*, forward_usage: bool = False) -> StreamAssembler:
    return StreamAssembler("smol:triage/3", "triage/3", forward_usage=forward_usage)


def payloads(events: list[str]) -> list[dict[str, Any]]:
    return [json.loads(event.removeprefix("data: ")) for event in events if event != DONE]


def test_a_whole_stream_is_stamped_and_ends_with_done() -> None:
    made = assembler()
    events = made.feed(WHOLE) + made.close()
    assert made.complete
    assert events[-1] == DONE
    assert events.count(DONE) == 1
    assert [one["choices"][0]["delta"]["content"] for one in payloads(events)] == ["Hé", "llo"]
    assert {(one["model"], one["system_fingerprint"]) for one in payloads(events)} == {("smol:triage/3", "triage/3")}
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (4, 2)


def test_usage_reaches_only_the_client_that_asked_for_it() -> None:
    asked, other = assembler(forward_usage=True), assembler()
    assert [one for one in payloads(asked.feed(WHOLE)) if one.get("usage")]
    assert not [one for one in payloads(other.feed(WHOLE)) if "usage" in one]


@pytest.mark.parametrize("cut", range(1, len(WHOLE), 7))
def test_where_the_pieces_are_cut_does_not_matter(cut: int) -> None:
    whole, pieces = assembler(), assembler()
    expected = whole.feed(WHOLE) + whole.close()
    assert pieces.feed(WHOLE[:cut]) + pieces.feed(WHOLE[cut:]) + pieces.close() == expected


@pytest.mark.parametrize(
    "broken",
    [
        "",
        chunk("Hello"),
        chunk("Hello") + DONE,
        chunk("Hello", finish="stop"),
        chunk("Hello", finish="stop") + chunk("other", index=1) + DONE,
        chunk("Hello", finish="stop")[:-9],
    ],
    ids=["nothing", "no finish, no done", "no finish", "no done", "one choice of two", "cut inside an event"],
)
def test_a_stream_that_breaks_off_ends_with_an_error_and_not_in_silence(broken: str) -> None:
    made = assembler()
    events = made.feed(broken) + made.close()
    assert not made.complete
    assert events[-1] == DONE
    error = payloads(events)[-1]["error"]
    assert error["type"] == "server_error"
    assert error["code"] == "overloaded"


@pytest.mark.parametrize(
    "fault", ['data: {"error": {"message": "EngineCore at /path died", "code": 500}}\n\n', "data: {not json\n\n"]
)
def test_the_engines_own_error_event_takes_our_shape_once(fault: str) -> None:
    made = assembler()
    events = made.feed(chunk("Hel") + fault + DONE) + made.feed(chunk("late")) + made.close()
    assert [("error" in one) for one in payloads(events)] == [False, True]
    assert "/path" not in events[1]
    assert events[-1] == DONE
    assert made.fault is not None


def test_one_choice_may_end_before_the_other() -> None:
    made = assembler()
    made.feed(chunk("a", index=0, finish="stop") + chunk("b", index=1) + chunk("c", index=1, finish="length") + DONE)
    assert made.complete


def test_a_refusal_that_comes_as_an_event_stays_the_clients_fault() -> None:
    made = assembler()
    made.feed('data: {"error": {"message": "too many logprobs", "param": "logprobs", "code": 400}}\n\n' + DONE)
    assert isinstance(made.fault, RequestError)
    assert (made.fault.status, made.fault.param) == (400, "logprobs")
