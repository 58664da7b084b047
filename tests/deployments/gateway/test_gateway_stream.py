import json
from typing import Any

import pytest

from cluster.errors import RequestError
from deployments.gateway.stream import DONE, StreamAssembler


def event(payload: dict[str, Any]) -> bytes:
    """As the engine writes it: no blanks, no escapes that are not needed."""
    return f"data: {json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def chunk(text: str = "", *, index: int = 0, finish: str | None = None) -> bytes:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": finish}
    return event({"id": "x", "model": "engine-name", "choices": [choice]})


USAGE = event({"id": "x", "choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}})
WHOLE = chunk("Hé") + chunk("llo", finish="stop") + USAGE + DONE


def assembler(*, forward_usage: bool = False, spoken_as: str | None = "engine-name") -> StreamAssembler:
    return StreamAssembler("smol:triage/3", "triage/3", forward_usage=forward_usage, spoken_as=spoken_as)


def payloads(events: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(event.removeprefix(b"data: ")) for event in events if event != DONE]


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
        b"",
        chunk("Hello"),
        chunk("Hello") + DONE,
        chunk("Hello", finish="stop"),
        chunk("Hello", finish="stop") + chunk("other", index=1) + DONE,
        chunk("Hello", finish="stop")[:-9],
    ],
    ids=["nothing", "no finish, no done", "no finish", "no done", "one choice of two", "cut inside an event"],
)
def test_a_stream_that_breaks_off_ends_with_an_error_and_not_in_silence(broken: bytes) -> None:
    made = assembler()
    events = made.feed(broken) + made.close()
    assert not made.complete
    assert events[-1] == DONE
    error = payloads(events)[-1]["error"]
    assert error["type"] == "server_error"
    assert error["code"] == "overloaded"


@pytest.mark.parametrize(
    "fault", [b'data: {"error": {"message": "EngineCore at /path died", "code": 500}}\n\n', b"data: {not json\n\n"]
)
def test_the_engines_own_error_event_takes_our_shape_once(fault: bytes) -> None:
    made = assembler()
    events = made.feed(chunk("Hel") + fault + DONE) + made.feed(chunk("late")) + made.close()
    assert [("error" in one) for one in payloads(events)] == [False, True]
    assert b"/path" not in events[1]
    assert events[-1] == DONE
    assert made.fault is not None


def test_one_choice_may_end_before_the_other() -> None:
    made = assembler()
    made.feed(chunk("a", index=0, finish="stop") + chunk("b", index=1) + chunk("c", index=1, finish="length") + DONE)
    assert made.complete


def test_a_refusal_that_comes_as_an_event_stays_the_clients_fault() -> None:
    made = assembler()
    made.feed(b'data: {"error": {"message": "too many logprobs", "param": "logprobs", "code": 400}}\n\n' + DONE)
    assert isinstance(made.fault, RequestError)
    assert (made.fault.status, made.fault.param) == (400, "logprobs")


SAYINGS = [
    "plain",
    'a "model":"engine-name" in quotation marks',
    '"finish_reason":"stop" and "usage":{"prompt_tokens":9}',
    "😀 é \\n\\n data: [DONE]",
    "two\n\nlines",
    '{"index":0,"delta":{"content":"nested"}}',
]


@pytest.mark.parametrize("saying", SAYINGS)
def test_stamping_bytes_gives_what_stamping_the_parsed_event_gives(saying: str) -> None:
    sent = chunk(saying) + chunk(saying, finish="stop") + USAGE + DONE
    quick, parsed = assembler(), assembler(spoken_as=None)
    one, other = quick.feed(sent) + quick.close(), parsed.feed(sent) + parsed.close()
    assert payloads(one) == payloads(other)
    assert quick.complete
    assert quick.usage == parsed.usage


def test_a_plain_event_is_stamped_without_being_written_anew() -> None:
    sent = event(
        {"id": "x", "model": "engine-name", "choices": [{"index": 0, "delta": {"content": "Hé"}}], "new": 1.50}
    )
    assert assembler().feed(sent) == [
        sent.replace(b'"model":"engine-name"', b'"model":"smol:triage/3","system_fingerprint":"triage/3"')
    ]


def test_an_event_after_the_end_of_the_only_choice_is_parsed_and_changes_nothing() -> None:
    made = assembler()
    made.feed(chunk("a", finish="stop") + chunk("late") + DONE)
    assert made.complete
