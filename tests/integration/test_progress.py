"""What a Ray worker reports reaches the person who waits, all of it and in order."""

import os
import time

import pytest
import ray
from ray.exceptions import WorkerCrashedError

from cluster.progress import Progress, Sink, relayed
from cluster.session import Session

pytestmark = pytest.mark.integration

STEPS = list(range(50))


def work(sink: Sink, stage: str = "train") -> None:
    for step in STEPS:
        sink(Progress(stage, step, len(STEPS)))


def test_every_report_of_a_worker_arrives_before_the_block_ends(ray_session: Session) -> None:
    seen: list[float] = []
    with relayed(lambda progress: seen.append(progress.done)) as sink:
        ray.get(ray.remote(work).remote(sink))
    assert seen == STEPS


def test_reports_of_several_workers_all_arrive_each_in_its_order(ray_session: Session) -> None:
    seen: dict[str, list[float]] = {"a": [], "b": []}
    with relayed(lambda progress: seen[progress.stage].append(progress.done)) as sink:
        ray.get([ray.remote(work).remote(sink, stage) for stage in seen])
    assert seen == {"a": STEPS, "b": STEPS}


def test_a_report_that_cannot_be_shown_does_not_keep_the_next_from_it(ray_session: Session) -> None:
    seen: list[float] = []

    def show(progress: Progress) -> None:
        if progress.done == 0:
            raise ValueError(progress)
        seen.append(progress.done)

    with relayed(show) as sink:
        ray.get(ray.remote(work).remote(sink))
    assert seen == STEPS[1:]


def test_what_a_worker_said_before_it_died_arrives(ray_session: Session) -> None:
    def die(sink: Sink) -> None:
        work(sink)
        os._exit(1)  # nothing that it left to be sent is sent

    seen: list[float] = []
    with relayed(lambda progress: seen.append(progress.done)) as sink, pytest.raises(WorkerCrashedError):
        ray.get(ray.remote(die).options(max_retries=0).remote(sink))
    assert seen == STEPS


def test_a_dead_mailbox_holds_up_neither_the_work_nor_the_end_of_the_block(ray_session: Session) -> None:
    began = time.monotonic()
    with relayed(lambda _: None) as sink:
        ray.kill(sink._mailbox)  # type: ignore[attr-defined]
        ray.get(ray.remote(work).remote(sink))
    assert time.monotonic() - began < 25
