"""The texts that wait for the model, and the one thread that takes them through it.

It knows lengths, futures and time. What a batch holds, `batches` decides; what an item is, who computes it.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from cluster.errors import CapacityError, RateLimitError
from cluster.vectors.port import Vectors
from deployments.batching import batches

logger = logging.getLogger(__name__)

Item = TypeVar("Item", bound=Sized)
"""One input as the model reads it; its length is in tokens."""
_RATE_MEMORY = 0.8
"""Share of the old estimate that stays in tokens/s when a batch has been timed."""


@dataclass
class _Request:
    rows: list[Vectors | None]
    left: int
    turn: int
    """Number of its last turn; that of the turn before the present one when it has just come."""
    future: Future[Vectors] = field(default_factory=Future)


@dataclass(frozen=True)
class _Text(Generic[Item]):
    item: Item
    request: _Request
    row: int
    since: float


class BatchQueue(Generic[Item]):
    """Bounded queue in front of `compute`, which turns N items into [N, D] float32.

    A batch starts when it is full or its oldest text has waited `batch_wait_s`. Calls take turns: a short
    question waits for one batch of each call that came before, not for all thousand texts of one of them.
    Safe to call from any thread.
    """

    def __init__(
        self,
        compute: Callable[[list[Item]], Vectors],
        *,
        batch_tokens: int,
        batch_wait_s: float,
        max_queued: int,
        max_tokens: int,
        part: str = "the model",
        section: str = "serve",
    ) -> None:
        self._compute = compute
        self._batch_tokens = batch_tokens
        self._batch_wait_s = batch_wait_s
        self._max_queued = max_queued
        self._max_tokens = max_tokens
        self._part = part
        self._section = section
        self._texts: list[_Text[Item]] = []
        self._turn = 0
        self._tokens_per_s: float | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    def submit(self, items: Sequence[Item]) -> Future[Vectors]:
        """The rows of these N items, when they are there: [N, D] in the same order.

        All of them are taken or none: raises `RateLimitError` if they would be more texts or tokens than may wait,
        `CapacityError` if this queue is being closed. Cancelling the future takes those that still wait out of it.
        """
        now = time.monotonic()
        with self._changed:
            self._require_room(len(items), sum(map(len, items)))
            # Before the call that is in the model now, after those that have waited since before it.
            request = _Request(rows=[None] * len(items), left=len(items), turn=self._turn - 1)
            self._texts += [_Text(item, request, row, now) for row, item in enumerate(items)]
            self._changed.notify()
        return request.future

    def require_room(self, texts: int) -> None:
        """Raises as `submit` would for so many texts without a token."""
        with self._changed:
            self._require_room(texts, 0)

    def close(self) -> None:
        """Stop the thread after its present batch; texts that still wait get `CapacityError`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    @property
    def waiting(self) -> int:
        """Texts that are not in a batch yet."""
        return len(self._texts)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of these."""
        return self._tokens()

    @property
    def alive(self) -> bool:
        """Whether texts still move."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            began = time.monotonic()
            lengths = [len(text.item) for text in batch]
            try:
                vectors = self._compute([text.item for text in batch])
            except Exception as failure:
                logger.exception("a batch of %s texts failed", len(batch))
                _fail(batch, failure)
                continue
            self._learn(batches.padded_tokens(lengths), time.monotonic() - began)
            _deliver(batch, vectors)
        with self._changed:
            left, self._texts = self._texts, []
        _fail(left, CapacityError(f"{self._part.capitalize()} is stopping."))

    def _next(self) -> list[_Text[Item]] | None:
        """The next batch, taken out of the queue; None once closed."""
        with self._changed:
            while True:
                # Whoever asked may have gone, or another of his texts may have failed.
                self._texts = [text for text in self._texts if not text.request.future.done()]
                if self._closed:
                    return None
                wait_s = self._wait_s()
                if wait_s is not None and wait_s <= 0:
                    break
                self._changed.wait(wait_s)
            first = min(range(len(self._texts)), key=lambda position: self._texts[position].request.turn)
            self._turn += 1
            self._texts[first].request.turn = self._turn
            chosen = batches.choose([len(text.item) for text in self._texts], self._batch_tokens, first)
            batch = [self._texts[position] for position in chosen]
            taken = set(chosen)
            self._texts = [text for position, text in enumerate(self._texts) if position not in taken]
            return batch

    def _wait_s(self) -> float | None:
        """How long the next batch may still wait for company; None while nothing waits."""
        if not self._texts:
            return None
        if self._tokens() >= self._batch_tokens:
            return 0.0
        return self._texts[0].since + self._batch_wait_s - time.monotonic()

    def _learn(self, tokens: int, seconds: float) -> None:
        rate = tokens / max(seconds, 1e-6)
        old = self._tokens_per_s
        self._tokens_per_s = rate if old is None else _RATE_MEMORY * old + (1 - _RATE_MEMORY) * rate

    def _clear_after_s(self) -> float:
        """When what waits now will have been worked off, by the speed seen so far."""
        return max(1.0, self._tokens() / self._tokens_per_s) if self._tokens_per_s else 1.0

    def _tokens(self) -> int:
        return sum(len(text.item) for text in self._texts)

    def _require_room(self, texts: int, tokens: int) -> None:
        if self._closed:
            raise CapacityError(f"{self._part.capitalize()} is stopping.")
        for waiting, more, most, what in (
            (len(self._texts), texts, self._max_queued, "texts"),
            (self._tokens(), tokens, self._max_tokens, "tokens"),
        ):
            if waiting + more > most:
                raise RateLimitError(
                    f"{waiting} {what} wait for {self._part}; {more} more would be over its limit of {most}.",
                    retry_after_s=self._clear_after_s(),
                    hint=f"Ask again later, send less at once, or raise {self._section}.replicas.",
                )


def _deliver(batch: Sequence[_Text[Any]], vectors: Vectors) -> None:
    for text, vector in zip(batch, vectors, strict=True):
        request = text.request
        request.rows[text.row] = vector
        request.left -= 1
        # False if the one who asked has gone meanwhile.
        if request.left == 0 and request.future.set_running_or_notify_cancel():
            request.future.set_result(np.stack([row for row in request.rows if row is not None]))


def _fail(texts: Sequence[_Text[Any]], failure: Exception) -> None:
    for request in {id(text.request): text.request for text in texts}.values():
        if not request.future.done() and request.future.set_running_or_notify_cancel():
            request.future.set_exception(failure)
