"""Why a run ended without its result, in one line: which rank, what happened, what to change.

Reads the errors that Ray Train hands back. Does not know what the run was learning.
"""

from collections.abc import Mapping
from pathlib import Path

from ray.exceptions import RayActorError
from ray.train import ControllerError, TrainingFailedError, WorkerGroupError

from cluster.errors import FlywheelError, TrainingError

# What the survivors of a dead worker see: the consequence, not the cause.
_COLLATERAL = ("connection closed by peer", "connection reset", "read error", "write error", "gloo", "nccl", "barrier")
_MEMORY = ("out of memory", "outofmemory", "allocate memory")


def explain(error: TrainingFailedError, *, workers: int, run_folder: Path) -> TrainingError:
    """The verdict on a failed fit."""
    if isinstance(error, WorkerGroupError) and error.worker_failures:
        rank, cause = first_cause(error.worker_failures)
        return TrainingError(f"Rank {rank} of {workers} failed: {_in_one_line(cause)}", hint=_hint(cause, run_folder))
    cause = error.controller_failure if isinstance(error, ControllerError) else error
    name = type(cause).__name__
    if "Startup" in name:
        return TrainingError(
            f"{workers} training workers could not be placed: {_in_one_line(cause)}",
            hint="Lower parallel.workers, or give Ray more CPUs or GPUs.",
        )
    return TrainingError(f"Ray Train stopped the run: {_in_one_line(cause)}", hint=f"See the logs in {run_folder}.")


def first_cause(failures: Mapping[int, BaseException]) -> tuple[int, BaseException]:
    """The failure that the others follow from: a dead process, then an error of our own, then the lowest rank."""

    def weight(item: tuple[int, BaseException]) -> tuple[int, int]:
        rank, error = item
        if isinstance(_underlying(error), RayActorError):
            return (0, rank)
        if isinstance(error, FlywheelError):
            return (1, rank)
        text = f"{type(error).__name__} {error}".lower()
        return (3 if any(sign in text for sign in _COLLATERAL) else 2, rank)

    return min(failures.items(), key=weight)


def _underlying(error: BaseException) -> BaseException:
    """Ray Train wraps a worker's death in an internal error that carries it."""
    return getattr(error, "health_check_failure", error)


def _in_one_line(error: BaseException) -> str:
    error = _underlying(error)
    if isinstance(error, RayActorError):
        return "its process died (killed, or out of memory)"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    if isinstance(error, FlywheelError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _hint(error: BaseException, run_folder: Path) -> str:
    if isinstance(error, FlywheelError) and error.hint:
        return error.hint
    text = f"{type(error).__name__} {error}".lower()
    if isinstance(_underlying(error), RayActorError) or any(sign in text for sign in _MEMORY):
        return "If memory ran out, lower optimizer.micro_batch_size or data.max_length, or use parallel.strategy=fsdp."
    return f"See the workers' logs in {run_folder}."
