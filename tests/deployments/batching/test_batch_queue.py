"""The queue in front of the model: order, bounds, failures and departures. The model is a plain function."""

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from cluster.errors import CapacityError, RateLimitError
from cluster.vectors.port import Vectors
from deployments.batching.queue import BatchQueue


class Model:
    """Turns each list of ids into [sum, length]; can be held, and can fail."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.free = threading.Event()
        self.free.set()
        self.entered = threading.Event()

    def __call__(self, token_ids: list[Sequence[int]]) -> Vectors:
        self.entered.set()
        self.batches.append([len(ids) for ids in token_ids])
        assert self.free.wait(5)
        if any(13 in ids for ids in token_ids):
            raise ValueError("unlucky")
        return np.array([[sum(ids), len(ids)] for ids in token_ids], dtype=np.float32)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def queue(model: Model) -> Iterator[BatchQueue[list[int]]]:
    made = BatchQueue(model, batch_tokens=100, batch_wait_s=0.01, max_queued=10, max_tokens=1000)
    yield made
    model.free.set()
    made.close()


def test_vectors_come_back_in_the_order_of_the_texts(queue: BatchQueue[list[int]]) -> None:
    texts = [[1] * 90, [2], [3] * 50, [4, 4]]
    vectors = queue.submit(texts).result(5)
    assert vectors.tolist() == [[90, 90], [2, 1], [150, 50], [8, 2]]
    assert vectors.dtype == np.float32


def test_callers_that_come_together_share_a_batch(model: Model) -> None:
    queue = BatchQueue(model, batch_tokens=100, batch_wait_s=0.5, max_queued=10, max_tokens=1000)
    first, second = queue.submit([[1, 1]]), queue.submit([[2, 2]])
    assert first.result(5).tolist() == [[2, 2]]
    assert second.result(5).tolist() == [[4, 2]]
    assert model.batches == [[2, 2]]
    queue.close()


def test_a_full_batch_does_not_wait_for_company(model: Model) -> None:
    queue = BatchQueue(model, batch_tokens=4, batch_wait_s=60, max_queued=10, max_tokens=1000)
    assert queue.submit([[1, 1], [2, 2]]).result(5).tolist() == [[2, 2], [4, 2]]
    queue.close()


def test_beyond_the_bound_all_texts_of_a_call_are_refused(queue: BatchQueue[list[int]], model: Model) -> None:
    model.free.clear()
    held = queue.submit([[1]])
    assert model.entered.wait(5)
    waiting = queue.submit([[2]] * 8)
    with pytest.raises(CapacityError, match="8 texts wait") as caught:
        queue.submit([[3]] * 3)
    assert caught.value.retry_after_s >= 1
    assert queue.waiting == 8
    last = queue.submit([[4]] * 2)
    model.free.set()
    assert [len(future.result(5)) for future in (held, waiting, last)] == [1, 8, 2]


def test_tokens_that_wait_are_bounded_too_and_leave_room_when_their_caller_goes(
    queue: BatchQueue[list[int]], model: Model
) -> None:
    model.free.clear()
    held = queue.submit([[1]])
    assert model.entered.wait(5)
    large = queue.submit([[2] * 300] * 3)
    with pytest.raises(RateLimitError, match=r"900 tokens wait for the model; 101 more .* limit of 1000"):
        queue.submit([[3] * 101])
    queue.require_room(7)
    with pytest.raises(RateLimitError, match="3 texts wait"):
        queue.require_room(8)
    assert queue.waiting_tokens == 900
    assert large.cancel()
    model.free.set()
    held.result(5)
    assert queue.submit([[1] * 500] * 2).result(5).shape == (2, 2)


def test_calls_take_turns_so_that_a_question_does_not_wait_for_a_whole_library(
    queue: BatchQueue[list[int]], model: Model
) -> None:
    model.free.clear()
    library = queue.submit([[1] * 60] * 6)
    assert model.entered.wait(5)
    question = queue.submit([[2] * 3])
    model.free.set()
    assert question.result(5).tolist() == [[6, 3]]
    assert library.result(5).shape == (6, 2)
    assert model.batches[:2] == [[60], [3]]


def test_a_long_text_is_not_starved_by_questions_that_keep_coming(queue: BatchQueue[list[int]], model: Model) -> None:
    model.free.clear()
    held = queue.submit([[1]])
    assert model.entered.wait(5)
    long = queue.submit([[1] * 500])
    questions = [queue.submit([[2] * 60]) for _ in range(5)]
    model.free.set()
    for future in (held, long, *questions):
        future.result(5)
    assert model.batches[1] == [500]


def test_a_failing_batch_fails_its_callers_only(queue: BatchQueue[list[int]]) -> None:
    bad = queue.submit([[13] * 80, [1]])
    with pytest.raises(ValueError, match="unlucky"):
        bad.result(5)
    assert queue.submit([[1, 1]]).result(5).tolist() == [[2, 2]]
    assert queue.alive


def test_who_leaves_takes_his_waiting_texts_along(queue: BatchQueue[list[int]], model: Model) -> None:
    model.free.clear()
    held = queue.submit([[1]])
    assert model.entered.wait(5)
    gone, stays = queue.submit([[5] * 50]), queue.submit([[7]])
    assert gone.cancel()
    model.free.set()
    assert held.result(5).tolist() == [[1, 1]]
    assert stays.result(5).tolist() == [[7, 1]]
    assert [50] not in model.batches


def test_closing_tells_those_who_wait(model: Model) -> None:
    queue = BatchQueue(model, batch_tokens=100, batch_wait_s=60, max_queued=10, max_tokens=1000)
    waiting = queue.submit([[1]])
    queue.close()
    with pytest.raises(CapacityError, match="stopping"):
        waiting.result(5)
    with pytest.raises(CapacityError, match="stopping"):
        queue.submit([[1]])
    assert not queue.alive
