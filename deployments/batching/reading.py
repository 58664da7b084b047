"""Texts into tokens beside the event loop, without one large call or one huge text keeping all others waiting.

One thread reads, because a fast tokenizer keeps its truncation setting in itself and may not be used by two. It reads
a slice of each call at a time, and of a text no more than is needed to know that it is too long. It knows no model:
what a token is, the caller's function says.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from cluster.errors import RateLimitError, RequestError

SLICE_BYTES = 128 << 10
"""What is read before it is another call's turn: some ten milliseconds."""
CHARACTERS_PER_TOKEN = 16
"""Of a text longer than the model's limit times this, only the beginning is read, unless it has too few tokens."""
_MARGIN_TOKENS = 128
"""A cut changes the tokens of the word that it cuts: WordPiece takes words of up to 100 characters."""
_MARGIN_CHARACTERS = 256
_FACTOR = 4
_ID_BYTES = 36
"""Of an integer in a Python list."""
_RETRY_AFTER_S = 1.0

Text = TypeVar("Text")
Read = TypeVar("Read")


def size_bytes(given: str | Sequence[int]) -> int:
    """Memory of a text, or of token ids, nearly."""
    if isinstance(given, str):
        return len(given) if given.isascii() else 4 * len(given)
    return _ID_BYTES * len(given)


def readable(text: str) -> str:
    """`text` without half surrogate pairs, which JSON can say and no tokenizer reads."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def beginning(text: str, limit: int, count: Callable[[str], int]) -> str:
    """As much of `text` as has certainly more than `limit` tokens; all of it, if it is short or has not so many.

    The first `limit` tokens of the beginning are those of the text. `count` says how many tokens a text has; it is
    asked for lengths that grow, so all that it reads is at most twice the text.
    """
    end = limit * CHARACTERS_PER_TOKEN
    while end < len(text):
        # At a blank if there is one near: fewer tokenizers notice.
        blank = text.rfind(" ", end - _MARGIN_CHARACTERS, end)
        cut = text[: blank if blank > 0 else end]
        if count(cut) > limit + _MARGIN_TOKENS:
            return cut
        end *= _FACTOR
    return text


def slices(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """From where to where inputs of these sizes in bytes are read at a time: at least one, and no more than a slice."""
    start = total = 0
    for position, size in enumerate(sizes):
        if position > start and total + size > SLICE_BYTES:
            yield start, position
            start, total = position, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)


class Reader:
    """The thread that reads. The bytes of what waits for it are bounded."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def read(
        self,
        texts: Sequence[Text],
        sizes: Sequence[int],
        work: Callable[[int, Sequence[Text]], Sequence[Read]],
        *,
        param: str,
    ) -> list[Read]:
        """What `work` makes of `texts`, whose `sizes` are in bytes; it is called in the thread, with where a slice of
        them begins and that slice, and what it raises is raised.

        Raises `RequestError` 400 for more than may ever wait, `RateLimitError` 429 for more than may wait now.
        """
        loop, made = asyncio.get_running_loop(), list[Read]()
        with self._held(sum(sizes), param):
            for start, end in slices(sizes):
                # A call's next slice comes after those of all others that wait.
                made += await loop.run_in_executor(self._thread, work, start, texts[start:end])
        return made

    @property
    def held_bytes(self) -> int:
        """Of texts that are not read yet."""
        return self._bytes

    def close(self) -> None:
        """Stop the thread after its present slice."""
        self._thread.shutdown(cancel_futures=True)

    @contextmanager
    def _held(self, size: int, param: str) -> Iterator[None]:
        if size > self._max_bytes:
            raise RequestError(
                f"The call has about {size} bytes of text; {self._max_bytes} is the most that may wait.",
                param=param,
                code="request_too_large",
                hint="Send it in several calls.",
            )
        if self._bytes + size > self._max_bytes:
            raise RateLimitError(
                f"{self._bytes} bytes of text wait to be tokenised; {size} more would be over the limit of "
                f"{self._max_bytes}.",
                retry_after_s=_RETRY_AFTER_S,
                hint="Ask again later, or send less at once.",
            )
        self._bytes += size
        try:
            yield
        finally:
            self._bytes -= size
