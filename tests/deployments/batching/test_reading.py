"""Reading: bounded in bytes, a slice of each call at a time, no more of a long text than is needed."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from cluster.errors import RateLimitError, RequestError
from deployments.batching.reading import CHARACTERS_PER_TOKEN, SLICE_BYTES, Reader, beginning, size_bytes, slices

MOST = 8 * SLICE_BYTES


@pytest.fixture
async def reader() -> AsyncIterator[Reader]:
    made = Reader(max_bytes=MOST)
    yield made
    assert made.held_bytes == 0
    made.close()


def lengths(start: int, texts: Sequence[str]) -> list[tuple[int, int]]:
    return [(start + place, len(text)) for place, text in enumerate(texts)]


def slowly(start: int, texts: Sequence[str]) -> list[tuple[int, int]]:
    time.sleep(0.05)
    return lengths(start, texts)


def test_a_slice_is_as_large_as_allowed_and_holds_one_at_least() -> None:
    assert list(slices([])) == []
    assert list(slices([1, 2, 3])) == [(0, 3)]
    assert list(slices([SLICE_BYTES, 1, SLICE_BYTES * 9, 5])) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    half = SLICE_BYTES // 2
    assert list(slices([half] * 5)) == [(0, 2), (2, 4), (4, 5)]


def test_sizes_are_of_memory() -> None:
    assert (size_bytes("abc"), size_bytes("äbc"), size_bytes([1, 2])) == (3, 12, 72)


async def test_what_is_read_comes_back_in_order(reader: Reader) -> None:
    texts = ["a" * (SLICE_BYTES // 3)] * 7 + ["b"]
    read = await reader.read(texts, [len(text) for text in texts], lengths, param="input")
    assert read == list(enumerate(map(len, texts)))


async def test_a_large_call_does_not_keep_a_small_one_waiting(reader: Reader) -> None:
    large = asyncio.create_task(reader.read(["x"] * 7, [SLICE_BYTES] * 7, slowly, param="input"))
    await asyncio.sleep(0.01)
    assert await reader.read(["y"], [1], lengths, param="input") == [(0, 1)]
    assert not large.done()
    assert len(await large) == 7


async def test_bytes_that_wait_are_bounded_and_given_back_whatever_happens(reader: Reader) -> None:
    async def call(size: int) -> object:
        return await reader.read(["x"], [size], slowly, param="input")

    with pytest.raises(RequestError) as never:
        await call(MOST + 1)
    assert (never.value.code, never.value.param) == ("request_too_large", "input")
    first = asyncio.create_task(call(MOST - 10))
    await asyncio.sleep(0.01)
    with pytest.raises(RateLimitError) as later:
        await call(11)
    assert (later.value.status, later.value.retry_after_s) == (429, 1)
    gone = asyncio.create_task(call(10))
    await asyncio.sleep(0.01)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    await call(10)
    await first

    def fails(start: int, texts: Sequence[str]) -> list[int]:
        raise RequestError(f"text {start} of {len(texts)}")

    with pytest.raises(RequestError, match="text 0 of 2"):
        await reader.read(["a", "b"], [1, 1], fails, param="input")


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("text", ["", "word " * 20, " " * 10_000, "x" * 10_000, "w " * 30 + " " * 10_000])
def test_a_text_of_few_tokens_is_read_whole_however_long_it_is(text: str) -> None:
    assert beginning(text, 32, words) == text


def test_of_a_huge_text_the_beginning_is_read_and_its_first_tokens_are_the_texts() -> None:
    seen: list[int] = []

    def counting(text: str) -> int:
        seen.append(len(text))
        return words(text)

    text = " ".join(f"word{number}" for number in range(500_000))
    begun = beginning(text, 64, counting)
    assert sum(seen) < 20 * CHARACTERS_PER_TOKEN * 64
    assert text.startswith(begun)
    assert begun.split()[:64] == text.split()[:64]
    assert words(begun) > 64


def test_a_text_that_begins_with_blanks_is_read_as_far_as_it_takes() -> None:
    begun = beginning(" " * 5000 + "word " * 100_000, 16, words)
    assert begun.split()[:16] == ["word"] * 16
    assert len(begun) < 40_000
