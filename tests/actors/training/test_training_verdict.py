"""A failed fit becomes one line that names the rank, the cause and what to change."""

import pickle
from pathlib import Path

from ray.exceptions import ActorDiedError
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError, WorkerHealthCheckFailedError

from actors.training.verdict import explain
from cluster.errors import DependencyError, TrainingError

COLLATERAL = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1234")
DEAD = WorkerHealthCheckFailedError("health check failed", ActorDiedError())


def verdict(failures: dict[int, Exception]) -> TrainingError:
    text = "Traceback (most recent call last):\n  File ...\n"
    return explain(WorkerGroupError(text, failures), workers=2, run_folder=Path("runs/r"))


def test_a_dead_process_is_the_cause_and_not_the_survivors_broken_connection() -> None:
    found = verdict({0: COLLATERAL, 1: DEAD})
    assert str(found) == "Rank 1 of 2 failed: its process died (killed, or out of memory)"
    assert "micro_batch_size" in str(found.hint)


def test_an_error_of_the_loop_is_named_before_its_consequences() -> None:
    found = verdict({0: COLLATERAL, 1: KeyError("labels")})
    assert str(found) == "Rank 1 of 2 failed: KeyError: 'labels'"


def test_our_own_errors_keep_their_words_and_their_hint() -> None:
    found = verdict({0: DependencyError("The registry does not answer.", hint="Start it."), 1: COLLATERAL})
    assert str(found) == "Rank 0 of 2 failed: The registry does not answer."
    assert found.hint == "Start it."


def test_running_out_of_memory_says_which_knob_to_turn() -> None:
    found = verdict({0: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 GB")})
    assert "micro_batch_size" in str(found.hint)


def test_workers_that_cannot_be_placed() -> None:
    error = ControllerError(WorkerGroupStartupTimeoutError(2))
    found = explain(error, workers=2, run_folder=Path("runs/r"))
    assert str(found).startswith("2 training workers could not be placed")
    assert "parallel.workers" in str(found.hint)


def test_a_verdict_is_one_line_and_survives_pickling() -> None:
    found = verdict({0: ValueError("first line\nsecond line\n  File 'x.py'")})
    again = pickle.loads(pickle.dumps(found))
    assert str(again) == "Rank 0 of 2 failed: ValueError: first line"
    assert again.hint == found.hint
