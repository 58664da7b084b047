"""A run's control, without Ray: wishes reach all workers at one step, and nobody is asked twice."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.training import control as controls
from actors.training.control import Control, ControlLink, Group, Heartbeat, Incident, Unlinked, Wish, agreed


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


NODE = "10.0.0.1/abc"
BEAT = Heartbeat(rank=0, node=NODE, pid=10, step=3, phase="compute", for_s=0.5)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def control(clock: Clock) -> Control:
    made = Control(clock)
    made.begin_group(Group(0.0, ((NODE, 10), (NODE, 11))))
    return made


def test_a_wish_is_heard_until_it_is_done(control: Control) -> None:
    assert control.beat(BEAT).wish is Wish.NONE
    number = control.ask(Wish.CHECKPOINT)
    assert control.beat(BEAT) == controls.Order(Wish.CHECKPOINT, number)
    control.done(number)
    assert control.beat(BEAT).wish is Wish.NONE


def test_a_weightier_wish_takes_over_and_a_lighter_one_does_not(control: Control) -> None:
    first = control.ask(Wish.CHECKPOINT_AND_WAIT)
    assert control.ask(Wish.CHECKPOINT) == first
    assert control.ask(Wish.STOP) == first + 1
    control.done(first)  # comes late, and is not about the stop
    assert control.beat(BEAT).wish is Wish.STOP


def test_a_new_group_is_only_asked_to_stop(control: Control) -> None:
    again = Group(1.0, ((NODE, 20),))
    control.ask(Wish.CHECKPOINT_AND_WAIT)
    control.begin_group(again)
    assert control.see().wish is Wish.NONE
    control.ask(Wish.STOP)
    control.begin_group(again)
    assert control.see().wish is Wish.STOP


def test_workers_of_an_earlier_group_are_not_heard(control: Control) -> None:
    control.beat(replace(BEAT, step=9))
    control.commit(8)
    control.begin_group(Group(1.0, ((NODE, 20),)))
    control.ask(Wish.CHECKPOINT)
    assert control.beat(replace(BEAT, step=9)).wish is Wish.NONE
    seen = control.see()
    assert (seen.heartbeats, seen.step, seen.committed) == ({}, 8, 8)


def test_a_run_that_goes_on_has_its_checkpoint_from_the_first_moment(clock: Clock) -> None:
    """Else a worker that dies before the next commit would cost all steps since the run's beginning."""
    control = Control(clock, committed=40)
    control.begin_group(Group(0.0, ((NODE, 10),)))
    assert (control.see().step, control.see().committed) == (40, 40)
    control.beat(replace(BEAT, step=43))
    assert (control.see().step, control.see().committed) == (43, 40)


def test_all_wait_when_every_rank_does(control: Control) -> None:
    control.beat(replace(BEAT, phase="wait"))
    assert not control.see().waiting
    control.beat(replace(BEAT, rank=1, pid=11, phase="wait"))
    assert control.see().waiting


def test_kills_for_memory_are_counted_from_the_groups_begin(control: Control) -> None:
    control.beat(replace(BEAT, oom_kills=4))
    control.beat(replace(BEAT, rank=1, pid=11, oom_kills=6))
    assert control.see().memory_kills == {NODE: 2}
    control.begin_group(Group(1.0, ((NODE, 10),)))
    control.beat(replace(BEAT, oom_kills=6))
    assert control.see().memory_kills == {NODE: 0}


def test_a_count_that_was_asked_for_is_newer_than_the_last_heartbeat(control: Control) -> None:
    control.counted(NODE, 9)
    assert control.see().memory_kills == {}, "of how many it had before, nothing is known"
    control.beat(replace(BEAT, oom_kills=4))
    control.counted(NODE, 5)
    assert control.see().memory_kills == {NODE: 1}


V1 = """12:pids:/kubepods/pod1
4:memory:/kubepods/pod1
0::/
"""
COUNTS = {
    "memory/kubepods/pod1/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    "memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n",
    "kubepods/pod1/memory.events": "low 0\noom 6\noom_kill 5\noom_group_kill 0\n",
    "memory.events": "low 0\noom 2\noom_kill 2\n",
}


@pytest.mark.parametrize(
    ("own", "there", "kills"),
    [
        (V1, list(COUNTS), 3),
        (V1, ["memory/memory.oom_control"], 7),  # in a container that is not told its own place
        ("0::/kubepods/pod1\n", list(COUNTS), 5),
        ("0::/\n", ["memory.events"], 2),
        ("0::/kubepods/pod1\n", ["memory.events"], 2),
        (V1, [], None),
        ("0::/\n", ["memory/memory.oom_control"], None),
    ],
)
def test_kills_for_memory_are_read_from_either_kind_of_cgroup(
    own: str, there: list[str], kills: int | None, tmp_path: Path
) -> None:
    for name in there:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(COUNTS[name])
    (tmp_path / "own").write_text(own)
    assert controls.oom_kills(tmp_path / "own", tmp_path) == kills
    assert controls.oom_kills(tmp_path / "none", tmp_path) is None


def test_how_long_ago_a_heartbeat_came(control: Control, clock: Clock) -> None:
    control.beat(BEAT)
    clock.now += 4
    ((beat, ago),) = control.see().heartbeats.values()
    assert (beat, ago) == (BEAT, 4.0)


def test_incidents_are_kept_over_groups(control: Control) -> None:
    incident = Incident("killed", "Rank 1 of 2 died.", "", 1.0, 3, 1)
    control.happened(incident)
    control.begin_group(Group(1.0, ((NODE, 20),)))
    assert control.see().incidents == (incident,)


def test_the_weightiest_vote_counts_whoever_cast_it() -> None:
    assert agreed((0.0, 0.0, 0.0)) is Wish.NONE
    assert agreed((3.0, 0.0, 0.0)) is Wish.CHECKPOINT
    assert agreed((3.0, 1.0, 0.0)) is Wish.CHECKPOINT_AND_WAIT
    assert agreed((3.0, 1.0, 1.0)) is Wish.STOP
    assert Unlinked().agreed(Unlinked().votes()) is Wish.NONE


class Local:
    """The actor of a run, called in this process: what `.remote` gives, `ray.get` hands back."""

    def __init__(self, control: Control) -> None:
        self._control, self._lock = control, threading.Lock()

    def __getattr__(self, method: str) -> Any:
        return LocalMethod(getattr(self._control, method), self._lock)


class LocalMethod:
    def __init__(self, method: Callable[..., Any], lock: threading.Lock) -> None:
        self._method, self._lock = method, lock

    def remote(self, *arguments: Any) -> Any:
        with self._lock:
            return self._method(*arguments)


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> tuple[Control, list[ControlLink]]:
    import os

    import ray

    monkeypatch.setattr(ray, "get", lambda answer, timeout=None: answer)
    control = Control()
    control.begin_group(Group(0.0, ((NODE, os.getpid()), (NODE, os.getpid()))))
    return control, [ControlLink(Local(control), rank=rank, node=NODE, every_s=0.01) for rank in (0, 1)]


def until(holds: Callable[[], bool]) -> None:
    for _ in range(500):
        if holds():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never came to be")


def test_two_workers_act_on_a_wish_together_and_once(links: tuple[Control, list[ControlLink]]) -> None:
    control, pair = links
    control.ask(Wish.CHECKPOINT)
    until(lambda: pair[0].votes() != (0.0, 0.0, 0.0))
    assert agreed([sum(votes) for votes in zip(*(link.votes() for link in pair), strict=True)]) is Wish.CHECKPOINT
    for link in pair:
        link.committed(4)
        link.done()
    until(lambda: control.see().wish is Wish.NONE and control.see().committed == 4)
    assert [link.votes() for link in pair] == [(0.0, 0.0, 0.0)] * 2
    for link in pair:
        link.close()


def test_a_terminated_process_asks_for_one_checkpoint(links: tuple[Control, list[ControlLink]]) -> None:
    _, pair = links
    controls.TERMINATED.set()
    try:
        assert pair[1].votes() == (1.0, 0.0, 0.0)
        pair[1].done()
        assert pair[1].votes() == (0.0, 0.0, 0.0)
    finally:
        controls.TERMINATED.clear()
        for link in pair:
            link.close()


def test_where_a_worker_stands_and_when_it_first_came_there(links: tuple[Control, list[ControlLink]]) -> None:
    control, (link, other) = links
    for phase, step in (("data", 4), ("collective", 4), ("compute", 4), ("compute", 5)):
        link.at(phase, step)  # type: ignore[arg-type]
    until(lambda: 0 in control.see().heartbeats and control.see().heartbeats[0][0].step == 5)
    marks = control.see().marks
    assert list(marks) == ["called", "started", "loaded", "data", "step"]
    assert sorted(marks.values()) == list(marks.values())
    link.stand_still(5, 0.0)
    until(lambda: control.see().heartbeats[0][0].phase == "wait")
    for each in (link, other):
        each.close()
