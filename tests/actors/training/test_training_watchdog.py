"""Who the others wait for, from heartbeats and stacks."""

import threading
import time

from actors.training.control import Group, Heartbeat, Phase, Seen, Wish
from actors.training.verdict import Verdict, judge_stuck
from actors.training.watchdog import Frame, Stack, Stuck, blame, is_stuck, stack_here

NODE = "10.0.0.1/abc"
IN_BACKWARD = Stack((Frame("/x/torch/autograd/graph.py", 825, "_engine_run_backward"),), "")
IN_COLLECTIVE = Stack((Frame("/x/torch/distributed/distributed_c10d.py", 3, "all_reduce"),), "")
ASLEEP = Stack((Frame("/home/me/objective.py", 12, "loss", "time.sleep(1e6)"),), "")


def seen(*points: tuple[int, Phase], for_s: float = 40.0, ago: float = 0.1, begun: bool = True) -> Seen:
    marks = {"step": 1.0} if begun else {}
    beats = {
        rank: (Heartbeat(rank, NODE, 10 + rank, step, phase, for_s, marks=marks), ago)
        for rank, (step, phase) in enumerate(points)
    }
    return Seen(
        group=Group(0.0, tuple((NODE, 10 + rank) for rank in range(len(points)))),
        heartbeats=beats,
        committed=0,
        step=max(step for step, _ in points),
        wish=Wish.NONE,
        incidents=(),
        groups=(),
        marks={},
        memory_kills={},
    )


def found(look: Seen, stacks: dict[int, Stack] | None = None, *, group_age_s: float = 100) -> Stuck:
    return blame(look, stacks or {}, group_age_s=group_age_s, every_s=0.5)


def suspects(look: Seen, stacks: dict[int, Stack] | None = None) -> list[int]:
    return [each.rank for each in found(look, stacks).suspects]


def judged(stuck: Stuck) -> Verdict:
    return judge_stuck(stuck, stuck_after_s=30, begin_within_s=90)


def stuck(look: Seen, *, group_age_s: float = 100, after_s: float = 30, begin_s: float = 90) -> bool:
    return is_stuck(look, group_age_s=group_age_s, after_s=after_s, begin_s=begin_s)


def test_only_a_group_in_which_nothing_moves_is_stuck() -> None:
    look = seen((3, "compute"), (3, "collective"))
    assert stuck(look)
    assert not stuck(look, after_s=41)
    assert not stuck(look, group_age_s=10), "it has only begun"
    assert not stuck(seen((3, "wait"), (3, "wait"))), "it was told to wait"


def test_a_group_may_take_longer_to_begin_than_for_a_step() -> None:
    """On a busy machine imports took longer than `stuck_after_s`, and one restart after the other was ended."""
    look = seen((5, "start"), (5, "data"), for_s=80, begun=False)
    assert not stuck(look)
    assert stuck(look, begin_s=70)
    assert stuck(look, begin_s=10, after_s=70), "it is never shorter than for a step"
    verdict = judged(found(look))
    assert "elastic.begin_within_s above 90" in verdict.hint


def test_workers_that_never_began_are_stuck_too() -> None:
    look = Seen(Group(0.0, ((NODE, 10), (NODE, 11))), {}, 0, 0, Wish.NONE, (), (), {}, {})
    assert stuck(look)
    assert not stuck(look, begin_s=120)
    verdict = judged(found(look))
    assert verdict.line == (
        "Ranks 0-1 of 2 on node 10.0.0.1/abc (process 10) are stuck (after step 0, nothing for 100 s): it has not begun"
    )


def test_who_does_not_answer_is_to_blame_before_all() -> None:
    look = seen((3, "collective"), (3, "collective"))
    look.heartbeats[1] = (look.heartbeats[1][0], 30.0)  # type: ignore[index]
    (suspect,) = found(look).suspects
    assert suspect.rank == 1
    assert "has not answered for 30 s" in suspect.doing


def test_who_is_a_step_behind_is_to_blame() -> None:
    assert suspects(seen((4, "collective"), (3, "compute"), (4, "collective"))) == [1]


def test_who_is_outside_the_collective_is_to_blame() -> None:
    assert suspects(seen((3, "collective"), (3, "data"))) == [1]


def test_stacks_tell_who_waits_inside_backward() -> None:
    """All are in the same phase: gradients are reduced inside backward."""
    look = seen((3, "compute"), (3, "compute"))
    assert suspects(look) == []
    assert suspects(look, {0: IN_BACKWARD, 1: ASLEEP}) == [1]
    verdict = judged(found(look, {0: IN_BACKWARD, 1: ASLEEP}))
    assert verdict.line == (
        "Rank 1 of 2 on node 10.0.0.1/abc (process 11) is stuck, and the other 1 wait for it "
        "(after step 3, nothing for 40 s): it is in loss at me/objective.py:12 (time.sleep(1e6))"
    )
    assert "stuck_after_s" in verdict.hint


def test_nobody_is_blamed_where_all_wait_for_each_other() -> None:
    look = seen((3, "collective"), (3, "collective"))
    verdict = judged(found(look, {0: IN_COLLECTIVE, 1: IN_COLLECTIVE}))
    assert verdict.line.startswith("All 2 ranks wait for each other")


def test_a_worker_alone_can_be_stuck() -> None:
    assert suspects(seen((3, "data")), {0: ASLEEP}) == [0]


def test_the_training_threads_stack_is_found_among_all() -> None:
    ready = threading.Event()

    def stuck_here() -> None:
        ready.set()
        time.sleep(1)

    thread = threading.Thread(target=stuck_here, name="TrainingThread(work)", daemon=True)
    thread.start()
    ready.wait()
    stack = stack_here()
    assert stack.frames[-1].function == "stuck_here"
    assert not stack.waits
    assert "Thread TrainingThread(work)" in stack.text
    assert "MainThread" in stack.text
