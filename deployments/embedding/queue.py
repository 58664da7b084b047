"""The texts that wait for the model, and the one thread that takes them through it.

It knows lengths, futures and time. What a batch holds, `batching` decides; what a token means, `encoder`.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from cluster.errors import CapacityError
from cluster.vectors.port import Vectors
from deployments.embedding import batching

logger = logging.getLogger(__name__)

TokenIds = Sequence[int]
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
class _Text:
    token_ids: TokenIds
    request: _Request
    row: int
    since: float


class EmbeddingQueue:
    """Bounded queue in front of `encode`, which turns N token id lists into [N, D] float32.

    A batch starts when it is full or its oldest text has waited `batch_wait_s`. Calls take turns: a short
    question waits for one batch of each call that came before, not for all thousand texts of one of them.
    Safe to call from any thread.
    """

    def __init__(
        self,
        encode: Callable[[list[TokenIds]], Vectors],
        *,
        batch_tokens: int,
        batch_wait_s: float,
        max_queued: int,
    ) -> None:
        self._encode = encode
        self._batch_tokens = batch_tokens
        self._batch_wait_s = batch_wait_s
        self._max_queued = max_queued
        self._texts: list[_Text] = []
        self._turn = 0
        self._tokens_per_s: float | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="embedding", daemon=True)
        self._thread.start()

    def submit(self, token_ids: Sequence[TokenIds]) -> Future[Vectors]:
        """The vectors of these N texts, when they are there: [N, D] in the same order.

        All of them are taken or none: raises `CapacityError` if they would be more than may wait. Cancelling
        the future takes those that still wait out of the queue.
        """
        now = time.monotonic()
        with self._changed:
            if self._closed:
                raise CapacityError("This embedder is stopping.")
            if len(self._texts) + len(token_ids) > self._max_queued:
                raise CapacityError(
                    f"{len(self._texts)} texts wait for the embedder; {len(token_ids)} more would be over its "
                    f"limit of {self._max_queued}.",
                    retry_after_s=self._clear_after_s(),
                    hint="Ask again later, send fewer texts at once, or raise serve.embedding.replicas.",
                )
            # Before the call that is in the model now, after those that have waited since before it.
            request = _Request(rows=[None] * len(token_ids), left=len(token_ids), turn=self._turn - 1)
            self._texts += [_Text(ids, request, row, now) for row, ids in enumerate(token_ids)]
            self._changed.notify()
        return request.future

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
    def alive(self) -> bool:
        """Whether texts still move."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            began = time.monotonic()
            lengths = [len(text.token_ids) for text in batch]
            try:
                vectors = self._encode([text.token_ids for text in batch])
            except Exception as failure:
                logger.exception("a batch of %s texts failed", len(batch))
                _fail(batch, failure)
                continue
            self._learn(batching.padded_tokens(lengths), time.monotonic() - began)
            _deliver(batch, vectors)
        with self._changed:
            left, self._texts = self._texts, []
        _fail(left, CapacityError("This embedder is stopping."))

    def _next(self) -> list[_Text] | None:
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
            chosen = batching.choose([len(text.token_ids) for text in self._texts], self._batch_tokens, first)
            batch = [self._texts[position] for position in chosen]
            taken = set(chosen)
            self._texts = [text for position, text in enumerate(self._texts) if position not in taken]
            return batch

    def _wait_s(self) -> float | None:
        """How long the next batch may still wait for company; None while nothing waits."""
        if not self._texts:
            return None
        if sum(len(text.token_ids) for text in self._texts) >= self._batch_tokens:
            return 0.0
        return self._texts[0].since + self._batch_wait_s - time.monotonic()

    def _learn(self, tokens: int, seconds: float) -> None:
        rate = tokens / max(seconds, 1e-6)
        old = self._tokens_per_s
        self._tokens_per_s = rate if old is None else _RATE_MEMORY * old + (1 - _RATE_MEMORY) * rate

    def _clear_after_s(self) -> float:
        """When what waits now will have been worked off, by the speed seen so far."""
        tokens = sum(len(text.token_ids) for text in self._texts)
        return max(1.0, tokens / self._tokens_per_s) if self._tokens_per_s else 1.0


def _deliver(batch: Sequence[_Text], vectors: Vectors) -> None:
    for text, vector in zip(batch, vectors, strict=True):
        request = text.request
        request.rows[text.row] = vector
        request.left -= 1
        # False if the one who asked has gone meanwhile.
        if request.left == 0 and request.future.set_running_or_notify_cancel():
            request.future.set_result(np.stack([row for row in request.rows if row is not None]))


def _fail(texts: Sequence[_Text], failure: Exception) -> None:
    for request in {id(text.request): text.request for text in texts}.values():
        if not request.future.done() and request.future.set_running_or_notify_cancel():
            request.future.set_exception(failure)
