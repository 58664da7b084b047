"""A failed fit becomes one line that names the rank, the place, the cause, what it costs and what to change."""

import pickle
from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError, RayTaskError
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError, WorkerHealthCheckFailedError

from actors.training.control import Heartbeat
from actors.training.verdict import Failure, Verdict, cost, explain, failure_of, judge, judge_room, places, ranks
from cluster.errors import ConfigError, DependencyError, FlywheelError, TrainingError

COLLATERAL = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1234")
DEAD = WorkerHealthCheckFailedError("health check failed", ActorDiedError())
BEAT = Heartbeat(1, "n", 7, 3, "compute", 0.1, rss_bytes=3 << 30)


def verdict(failures: dict[int, Exception]) -> FlywheelError:
    text = "Traceback (most recent call last):\n  File ...\n"
    return explain(WorkerGroupError(text, failures), workers=2, run_folder=Path("runs/r"))


def judged(*found: tuple[int, BaseException], workers: int = 4, **facts: object) -> Verdict:
    made = [failure_of(rank, error, **facts) for rank, error in found]  # type: ignore[arg-type]
    return judge(made, workers=workers, logs="runs/r")


def test_a_dead_process_is_the_cause_and_not_the_survivors_broken_connection() -> None:
    found = verdict({0: COLLATERAL, 1: DEAD})
    assert str(found) == "Rank 1 of 2 died: killed, or crashed in native code (perhaps for memory)."
    assert "micro_batch_size" in str(found.hint)


def test_an_error_of_the_loop_is_named_before_its_consequences() -> None:
    found = verdict({0: COLLATERAL, 1: KeyError("labels")})
    assert str(found) == "Rank 1 of 2 failed: KeyError: 'labels'."


def test_an_error_of_ours_that_may_pass_is_told_with_its_rank_and_its_hint() -> None:
    found = verdict({0: DependencyError("The registry does not answer.", hint="Start it."), 1: COLLATERAL})
    assert str(found) == "Rank 0 of 2 failed: The registry does not answer."
    assert found.hint == "Start it."


def test_a_mistake_is_told_as_whoever_found_it_said_it() -> None:
    said = ConfigError("There is no layer no_such_layer.", hint="Take q_proj.")
    assert verdict({0: said, 1: COLLATERAL}) is said


def test_equal_causes_of_several_ranks_are_one() -> None:
    broken = ValueError("labels are missing")
    found = judged((3, COLLATERAL), (0, broken), (1, broken), (2, broken))
    assert found.line == "Ranks 0-2 of 4 failed: ValueError: labels are missing"
    assert found.mistake


def test_ranks_that_died_alike_are_one_however_much_each_held() -> None:
    """Ray's errors name the actor, so no two of them are the same text."""
    found = [Failure(rank, "killed", f"died: killed; it held {rank}.5 GiB", mark=f"actor {rank}") for rank in range(3)]
    assert judge(found, workers=4, logs="runs/r").line == "Ranks 0-2 of 4 died: killed; it held 0.5 GiB"


def test_a_place_is_named_where_it_is_known() -> None:
    found = judged((1, DEAD), node="10.0.0.3/3fa9c1", pid=123, beat=BEAT, memory_kills=0)
    assert found.line == (
        "Rank 1 of 4 on node 10.0.0.3/3fa9c1 (process 123) died: killed, or crashed in native code "
        "(no kill for memory was counted there); it held 3.0 GiB"
    )
    assert not found.mistake


@pytest.mark.parametrize(
    ("error", "facts", "kind", "says"),
    [
        (DEAD, {"memory_kills": 1, "beat": BEAT}, "oom", "memory limit was reached; it held 3.0 GiB"),
        (WorkerHealthCheckFailedError("", OutOfMemoryError("memory")), {}, "oom", "ran out of memory"),
        (DEAD, {"node_lost": True}, "node", "was lost with its node"),
        (WorkerHealthCheckFailedError("", NodeDiedError("gone")), {}, "node", "was lost with its node"),
        (WorkerHealthCheckFailedError("", TimeoutError("no answer")), {}, "silent", "did not answer"),
        (ActorDiedError(), {}, "data", "lost its data feed"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 GB"), {}, "error", "can't allocate"),
        (COLLATERAL, {}, "error", "Connection closed by peer"),
    ],
)
def test_what_each_error_means(error: BaseException, facts: dict[str, object], kind: str, says: str) -> None:
    found = judged((0, error), **facts)
    assert (found.kind, found.mistake) == (kind, False)
    assert says in found.line


def test_running_out_of_memory_says_which_knob_to_turn() -> None:
    found = verdict({0: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 GB")})
    assert "micro_batch_size" in str(found.hint)


def test_an_error_that_user_code_raised_in_a_ray_task_is_not_called_a_lost_feed() -> None:
    task = RayTaskError("read", "traceback", ValueError("no column labels")).as_instanceof_cause()
    assert judged((0, task)).mistake


def test_an_error_that_comes_again_at_the_same_step_is_a_mistake() -> None:
    once = [failure_of(0, RuntimeError("odd"))]
    assert not judge(once, workers=1, logs="").mistake
    again = judge(once, workers=1, logs="", again=True)
    assert again.mistake
    assert again.line.endswith("at the same step as before")


def test_workers_that_cannot_be_placed() -> None:
    error = ControllerError(WorkerGroupStartupTimeoutError(2))
    found = explain(error, workers=2, run_folder=Path("runs/r"))
    assert str(found).startswith("2 training workers could not be placed")
    assert "parallel.workers" in str(found.hint)


def test_the_verdict_that_the_controller_reached_is_the_one_told() -> None:
    reached = TrainingError("Rank 1 of 2 is stuck.", hint="…")
    assert explain(ControllerError(reached), workers=2, run_folder=Path("r")) is reached


def test_a_verdict_is_one_line_and_survives_pickling() -> None:
    found = verdict({0: ValueError("first line\nsecond line\n  File 'x.py'")})
    again = pickle.loads(pickle.dumps(found))
    assert str(again) == "Rank 0 of 2 failed: ValueError: first line."
    assert again.hint == found.hint


def test_a_cluster_without_room_is_told_what_it_lacks() -> None:
    nodes = [{"CPU": 4.0}, {"CPU": 3.0, "GPU": 1.0}]
    assert judge_room(nodes, {"CPU": 1.0}, wanted=7) is None
    found = judge_room(nodes, {"GPU": 1.0}, wanted=3)
    assert found is not None
    assert found.line == (
        "3 training workers of 1 GPU each cannot be placed: the 2 nodes of the cluster have room for 1, "
        "it lacks 2 more GPU"
    )
    split = judge_room(nodes, {"CPU": 5.0}, wanted=1)
    assert split is not None
    assert "no single node" in split.line
    assert places(nodes, {"CPU": 2.0}) == 3


def test_what_a_restart_costs() -> None:
    assert cost(step=12, committed=12) == "nothing is lost: step 12 is committed"
    assert cost(step=12, committed=10) == "2 steps after the commit of step 10 will be trained again, no row is lost"
    assert cost(step=0, committed=0) == "no step was done yet"


def test_ranks_are_named_in_spans() -> None:
    assert ranks([4]) == "Rank 4"
    assert ranks([0, 1, 2, 3, 6]) == "Ranks 0-3 and 6"
    assert ranks([0, 2, 4, 5]) == "Ranks 0, 2, 4-5"
