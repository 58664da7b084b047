"""Many callers' inputs on their way through one model: admitted, read, computed in common batches, handed back.

It puts `reading` before `queue`. It knows no HTTP, no Ray, and not what the model makes of a text.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from cluster.errors import RequestError
from cluster.vectors.port import Vectors
from deployments.batching.config import EncoderConfig
from deployments.batching.queue import BatchQueue, Item
from deployments.batching.reading import Reader

Text = TypeVar("Text")


class Batcher(Generic[Item]):
    """`compute` turns N read inputs into N rows, in one pass. `part` is what a person calls the model, `section` where
    its settings stand."""

    def __init__(
        self, config: EncoderConfig, compute: Callable[[list[Item]], Vectors], *, part: str, section: str
    ) -> None:
        self._config = config
        self._section = section
        self._reader = Reader(max_bytes=config.max_queued_bytes)
        self._queue = BatchQueue(
            compute,
            batch_tokens=config.batch_tokens,
            batch_wait_s=config.batch_wait_s,
            max_queued=config.max_queued,
            max_tokens=config.max_queued_tokens,
            part=part,
            section=section,
        )

    async def run(
        self,
        texts: Sequence[Text],
        sizes: Sequence[int],
        read: Callable[[int, Sequence[Text]], Sequence[Item]],
        *,
        param: str,
    ) -> tuple[Vectors, list[int]]:
        """Rows [N, D] of N texts, and the tokens of each. `sizes` in bytes; `read` as `Reader.read` wants it.

        Raises `RequestError` 400 naming `param` for a call that could never be taken, `RateLimitError` 429 for one
        that cannot be taken now, and what `read` raises.
        """
        if len(texts) > self._config.max_queued:
            raise self._too_much(f"{len(texts)} inputs", self._config.max_queued, "max_queued", param)
        # Asked before the work of reading: with the answer no, that work would be for nothing.
        self._queue.require_room(len(texts))
        items = await self._reader.read(texts, sizes, read, param=param)
        tokens = [len(item) for item in items]
        if sum(tokens) > self._config.max_queued_tokens:
            raise self._too_much(f"{sum(tokens)} tokens", self._config.max_queued_tokens, "max_queued_tokens", param)
        return await asyncio.wrap_future(self._queue.submit(items)), tokens

    @property
    def waiting(self) -> dict[str, int]:
        """What waits, in each measure that is bounded."""
        return {
            "texts": self._queue.waiting,
            "tokens": self._queue.waiting_tokens,
            "unread_bytes": self._reader.held_bytes,
        }

    def require_alive(self) -> None:
        """Raises if nothing moves any more."""
        if not self._queue.alive:
            raise RuntimeError("the thread that computes has ended")

    def close(self) -> None:
        """Stop the threads; what still waits gets `CapacityError`."""
        self._queue.close()
        self._reader.close()

    def _too_much(self, what: str, most: int, setting: str, param: str) -> RequestError:
        return RequestError(
            f"{what} in one call; at most {most} are taken.",
            param=param,
            code="request_too_large",
            hint=f"Send them in several calls, or raise {self._section}.{setting}.",
        )
