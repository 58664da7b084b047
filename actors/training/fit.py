"""One fit of Ray Train, from its start to a result, a verdict or a stop; and who may end it from outside.

Knows Ray Train's trainer and its errors. Does not know what is trained.
"""

import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import ray
from ray.train import TrainingFailedError

from actors.training import ray_internals, verdict
from actors.training.config import TrainConfig
from actors.training.control import Wish
from actors.training.job import Outcome, Stopped
from cluster.errors import CapacityError, TrainingError

logger = logging.getLogger(__name__)

_RETRY_AFTER_S: Final = 60.0


class StoppedRun(KeyboardInterrupt):
    """A run that was asked to end (SIGTERM, `ray job stop`), and is saved. Goes the way of Ctrl-C.

    The text says where it stands.
    """


def resources_per_worker(config: TrainConfig) -> dict[str, float]:
    """What each worker asks of the running cluster: a GPU if there is one for the smallest group, else a CPU."""
    on_gpu = ray.cluster_resources().get("GPU", 0) >= config.parallel.workers.min
    return {"GPU": 1.0} if on_gpu else {"CPU": 1.0}


def require_room(config: TrainConfig, per_worker: Mapping[str, float]) -> None:
    """`CapacityError` that names what is missing if the cluster can never place `parallel.workers.min` workers.

    Where an autoscaler may add nodes, what it may grow to counts.
    """
    nodes: Sequence[Mapping[str, float]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    refused = verdict.judge_room(nodes, per_worker, wanted=config.parallel.workers.min)
    most = ray_internals.most_resources()
    if refused is None or (most and verdict.judge_room([most], per_worker, wanted=config.parallel.workers.min) is None):
        return
    raise CapacityError(f"{refused.line}.", hint=refused.hint, retry_after_s=_RETRY_AFTER_S)


def fit(trainer: ray_internals.Trainer, control: Any, config: TrainConfig, run_folder: Path) -> Outcome:
    """The outcome of the whole run.

    Raises the verdict of a run that failed (`TrainingError`, or the error that ended it), `KeyboardInterrupt` if
    Ctrl-C ended it, `StoppedRun` if SIGTERM did. The workers are gone by then.
    """
    with ray_internals.told(config.elastic), _interruptible(), _stoppable(control, config.elastic.resize_wait_s):
        try:
            returned: Outcome | Stopped | None = trainer.fit().return_value
        except TrainingFailedError as error:
            logger.debug("the fit failed", exc_info=error)
            raise verdict.explain(error, workers=config.parallel.workers.max, run_folder=run_folder) from None
        except ray.exceptions.RayError as error:
            logger.debug("the fit was lost", exc_info=error)
            said = verdict.first_line(error) or type(error).__name__
            raise TrainingError(
                f"The run lost the process that looks after its workers (Ray Train's controller): {said}.",
                hint="It is saved up to its last checkpoint. If nobody ended that process, memory may have run out.",
            ) from None
    if isinstance(returned, Stopped):
        raise StoppedRun(f"stopped by SIGTERM after step {returned.position.step}, which is saved")
    if returned is None:
        raise TrainingError("The run ended without a result.", hint="Take it up again with --resume.")
    return returned


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C as everywhere else: the run is stopped and `KeyboardInterrupt` goes on to the caller.

    `fit` puts its own SIGINT handler in place, ends the process with `SystemExit(0)` after stopping the workers,
    and leaves the handler there for good (`DataParallelTrainer._register_sigint_handler`, ray 2.60).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _stoppable(control: Any, wait_s: float) -> Iterator[None]:
    """The first SIGTERM asks the workers to save and end; after `wait_s`, or with the second, it is Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked, over = threading.Event(), threading.Event()

    def ask() -> None:
        asked.wait()
        if over.is_set():
            return
        try:
            ray.get(control.ask.remote(Wish.STOP), timeout=5)
        except ray.exceptions.RayError as error:
            logger.warning("the workers do not hear that they are to stop: %s", error)
        if not over.wait(wait_s):
            os.kill(os.getpid(), signal.SIGINT)

    def on_sigterm(*_: Any) -> None:
        if asked.is_set():
            os.kill(os.getpid(), signal.SIGINT)
        asked.set()

    threading.Thread(target=ask, daemon=True, name="stop-on-sigterm").start()
    before = signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        over.set()
        asked.set()
