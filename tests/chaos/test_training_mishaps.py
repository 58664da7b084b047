"""One thing goes wrong in a run of two real workers, on a cluster of two nodes, and the run says what it was.

What `test_training_chaos` does not do: mistakes, workers that are stuck, memory, nodes taken back, data workers.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.training.audit import audit_run
from actors.training.config import TrainConfig
from app.bench.raylets import Node, Raylets
from app.bench.rehearsal import Happening, Play, Rehearsal, base_and_data
from cluster import environment
from tests.chaos import mishap
from tests.chaos.mishap import Mishap

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

START_S = 240
SETTINGS: dict[str, Any] = {
    "adapter": {"r": 4, "alpha": 8},
    "optimizer": {"learning_rate": 2e-3, "global_batch_size": 4, "micro_batch_size": 1},
    "checkpoint": {"every_steps": 5},
    "precision": "fp32",
    "steps": 60,
    "parallel": {"workers": {"min": 2, "max": 2}, "threads_per_worker": 1},
    "failures": {"max": 2},
}
ENDLESS = {"steps": 100_000, "checkpoint": {"every_steps": 100_000}}
ELASTIC = {"parallel": {"workers": {"min": 1, "max": 2}, "threads_per_worker": 1}}


class Place:
    """A cluster of a head and a second node, with room for one worker on each."""

    def __init__(self, cluster: Raylets) -> None:
        self.cluster = cluster
        self.second = cluster.add()

    def replaced(self, env: dict[str, str] | None = None) -> Node:
        """Another second node, with `env`."""
        self.cluster.lose(self.second)
        self.second = self.cluster.add(env=env)
        return self.second


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with Raylets() as cluster:
        yield Place(cluster)


@pytest.fixture
def follow(place: Place, tmp_path: Path) -> Iterator[Callable[..., Rehearsal]]:
    """Starts a run of two workers with these changes of its settings."""
    with contextlib.ExitStack() as stack:

        def start(deed: Mishap | None = None, **changes: Any) -> Rehearsal:
            place.cluster.until_up(place.second)
            acted = Play(tmp_path, {**SETTINGS, **changes}, run_id=tmp_path.name.replace("_", "-"))
            env = {
                **place.cluster.env,
                environment.RAY_ADDRESS: place.cluster.address,
                environment.HOME: str(tmp_path),
                **(mishap.told(deed) if deed else {}),
            }
            return stack.enter_context(Rehearsal(acted, env, tmp_path / "log"))

        yield start


def incident(followed: Rehearsal, after: int = 0) -> Happening:
    return followed.until(lambda each: each.what == "incident", after=after, within_s=START_S)


def groups(followed: Rehearsal) -> int:
    return sum(each.what == "group" for each in followed.happened)


def stopped(followed: Rehearsal) -> Any:
    """Ends an endless run, and gives the account of its rows."""
    followed.process.send_signal(signal.SIGTERM)
    assert "stopped" in followed.end()
    return audited(followed)


def audited(followed: Rehearsal) -> Any:
    acted = followed.play
    _, data = base_and_data(acted)
    return audit_run(acted.run_id, TrainConfig.model_validate(acted.settings), data, acted.stage)


def nobody_is_left(members: list[tuple[str, int]]) -> bool:
    left = [psutil.Process(pid) for _, pid in members if psutil.pid_exists(pid)]
    return not psutil.wait_procs(left, timeout=15)[1]


def test_a_rank_that_dawdles_outside_a_collective_is_named_with_its_line(
    follow: Callable[..., Rehearsal], tmp_path: Path
) -> None:
    """Rank 0 waits for it inside `backward`, in the very same phase: only the stacks tell them apart."""
    deed = Mishap("dawdle", str(tmp_path / "done"), rank=1)
    stuck_after_s = 10.0
    followed = follow(deed, elastic={"stuck_after_s": stuck_after_s})
    found = incident(followed)
    node, pid = followed.members()[1]
    verdict = found.facts["verdict"]
    assert verdict.startswith(f"Rank 1 of 2 on node {node} (process {pid}) is stuck, and the other 1 wait for it")
    assert "it is in dawdle at chaos/mishap.py:" in verdict
    assert "(time.sleep(3600))" in verdict
    assert stuck_after_s < found.at - deed.at_s() < stuck_after_s + 6
    assert followed.end(within_s=START_S)["steps"] == SETTINGS["steps"]
    assert [each["kind"] for each in followed.incidents()] == ["stuck"]
    assert groups(followed) == 2
    assert audited(followed).exact


def test_a_mistake_of_one_rank_ends_the_run_at_once_and_is_not_tried_again(
    follow: Callable[..., Rehearsal], tmp_path: Path
) -> None:
    deed = Mishap("mistake", str(tmp_path / "done"), rank=1)
    followed = follow(deed)
    ended = followed.end(within_s=START_S)
    node, pid = followed.members()[1]
    assert ended["message"] == f"Rank 1 of 2 on node {node} (process {pid}) failed: KeyError: 'labels'."
    assert time.time() - deed.at_s() < 20
    (told,) = followed.incidents()
    assert told["kind"] == "mistake"
    assert told["verdict"].startswith(ended["message"][:-1])
    assert groups(followed) == 1
    assert nobody_is_left(followed.members())


@pytest.mark.parametrize(("title", "kinds"), [("ray::Read", []), ("ray::SplitCoordinator", ["data"])])
def test_a_data_worker_that_dies_is_replaced(
    follow: Callable[..., Rehearsal], place: Place, title: str, kinds: list[str]
) -> None:
    """A reader's task is Ray's to do again; who deals the rows is started again with the workers."""
    followed = follow(**ENDLESS)
    followed.step(30, within_s=START_S)
    nodes = (place.cluster.head, place.second)
    victims = [each for node in nodes for each in node.processes(title)]
    assert victims, sorted(each.name() for node in nodes for each in node.processes("ray::"))
    began = len(followed.happened)
    for victim in victims:
        victim.kill()
    if kinds:
        found = incident(followed, began)
        assert "lost its data feed" in found.facts["verdict"]
        assert "ActorDiedError" in found.facts["verdict"]
        began = followed.happened.index(found)
    seen = max(each.facts["step"] for each in followed.happened if each.what == "step")
    followed.step(seen + 200, after=began, within_s=START_S)
    account = stopped(followed)
    assert [each["kind"] for each in followed.incidents()] == kinds
    assert account.exact, account.doubts


def test_a_node_that_is_taken_back_costs_a_preemption_and_no_step(
    follow: Callable[..., Rehearsal], place: Place
) -> None:
    followed = follow(**{**ENDLESS, **ELASTIC}, failures={"max": 0, "preemptions": 1})
    followed.step(30, workers=2, within_s=START_S)
    began = len(followed.happened)
    taken = next(node for node, _ in followed.members() if node.startswith(place.second.ip))
    told_s = time.time()
    place.cluster.drain(place.second, within_s=90)
    found = incident(followed, began)
    assert found.facts["kind"] == "preempted"
    assert taken.split("/")[1] in found.facts["verdict"]
    assert found.facts["lost_steps"] == 0
    alone = followed.step(1, workers=1, after=began, within_s=START_S)
    assert alone.at - told_s < 60, "it does not wait for the deadline"
    assert alone.facts["step"] == found.facts["step"] + 1, "nothing is trained again"
    place.replaced()
    both = followed.step(1, workers=2, after=followed.happened.index(alone), within_s=START_S)
    assert both.facts["step"] > alone.facts["step"]
    account = stopped(followed)
    assert account.exact, account.doubts
    assert [each["kind"] for each in followed.incidents()] == ["preempted", "resize"]


@pytest.fixture
def watched(place: Place) -> Iterator[Node]:
    """A node on which Ray's memory monitor bears 5 GiB more than is in use now; a run that starts takes some 3."""
    memory = psutil.virtual_memory()
    threshold = (memory.total - memory.available + (5 << 30)) / memory.total
    yield place.replaced({"RAY_memory_usage_threshold": f"{threshold:.4f}", "RAY_memory_monitor_refresh_ms": "100"})
    place.replaced()


def test_ray_ends_a_worker_for_memory(
    follow: Callable[..., Rehearsal], watched: Node, place: Place, tmp_path: Path
) -> None:
    followed = follow(Mishap("hog", str(tmp_path / "done"), ip=watched.ip))
    expect_death_for_memory(followed, place, "was killed by Ray, whose node ran out of memory; it held")


LONG = {"steps": 1000, "checkpoint": {"every_steps": 20}}


def expect_to_be_taken_up(follow: Callable[..., Rehearsal], killed: Rehearsal) -> None:
    """Nobody is left of `killed`, and another driver ends its run as if it had not been."""
    assert nobody_is_left(killed.members())
    again = follow(**LONG)
    assert again.step(1, within_s=START_S).facts["step"] > 20, "it goes on"
    assert again.end(within_s=START_S)["steps"] == LONG["steps"]
    assert again.incidents() == []
    account = audited(again)
    assert account.exact, account.doubts


def test_a_run_that_lost_its_controller_says_so(follow: Callable[..., Rehearsal], place: Place) -> None:
    followed = follow(**LONG)
    followed.step(50, within_s=START_S)
    nodes = (place.cluster.head, place.second)
    (controller,) = (each for node in nodes for each in node.processes("ray::TrainController"))
    controller.kill()
    ended = followed.end(within_s=60)
    assert ended["error"] == "TrainingError"
    assert "lost the process that looks after its workers" in ended["message"]
    assert "saved up to its last checkpoint" in ended["hint"]
    expect_to_be_taken_up(follow, followed)


def test_a_run_whose_driver_is_killed_leaves_nobody(follow: Callable[..., Rehearsal]) -> None:
    followed = follow(**LONG)
    followed.step(50, within_s=START_S)
    followed.process.kill()
    expect_to_be_taken_up(follow, followed)


CGROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def narrow(place: Place) -> Iterator[Node]:
    """A node whose processes share 3 GiB, by a memory cgroup."""
    folder = CGROUPS / f"flywheel-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup (v1) can be made here: {error}")
    try:
        (folder / "memory.limit_in_bytes").write_text(str(3 << 30))
        node = place.replaced()
        for each in node.processes():
            (folder / "cgroup.procs").write_text(str(each.pid))  # and so whatever they start
        yield node
        place.replaced()
    finally:
        folder.rmdir()


def test_the_kernel_ends_a_worker_for_memory(
    follow: Callable[..., Rehearsal], narrow: Node, place: Place, tmp_path: Path
) -> None:
    """Nobody is left on its node who could tell that the count went up: a task is sent there to look."""
    followed = follow(Mishap("hog", str(tmp_path / "done"), ip=narrow.ip))
    expect_death_for_memory(followed, place, "was killed: its node's memory limit was reached; it held")


def expect_death_for_memory(followed: Rehearsal, place: Place, said: str) -> None:
    found = incident(followed)
    assert found.facts["kind"] == "oom", found.facts["verdict"]
    (rank,) = (rank for rank, (node, _) in enumerate(followed.members()) if node.startswith(place.second.ip))
    node, pid = followed.members()[rank]
    assert found.facts["verdict"].startswith(f"Rank {rank} of 2 on node {node} (process {pid}) {said} ")
    assert "micro_batch_size" in found.facts["hint"]
    ended = followed.end(within_s=START_S)
    assert ended.get("steps") == SETTINGS["steps"], ended
    assert [each["kind"] for each in followed.incidents()] == ["oom"]
    assert audited(followed).exact
