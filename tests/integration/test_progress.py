"""What a Ray worker reports reaches the person who waits, all of it and in order."""

import pytest
import ray

from cluster.progress import Progress, Sink, relayed
from cluster.session import Session

pytestmark = pytest.mark.integration


def test_every_report_of_a_worker_arrives_before_the_block_ends(ray_session: Session) -> None:
    seen: list[float] = []

    def work(sink: Sink) -> None:
        for step in range(50):
            sink(Progress("train", step, 50))

    with relayed(lambda progress: seen.append(progress.done)) as sink:
        ray.get(ray.remote(work).remote(sink))
    assert seen == list(range(50))
