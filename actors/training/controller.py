"""The driver's side of a training run: the feed's order, the Ray Train fit, its result or its verdict.

Knows Ray Train and Ray Data. Does not know how a worker trains (`loop`), and does not load transformers or
peft, so that the process that shows the progress stays light.
"""

import logging
import signal
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.data
from ray.train import CheckpointConfig, DataConfig, FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer

from actors.data import feed
from actors.data.version import DataVersion
from actors.training import verdict
from actors.training.config import TrainConfig
from actors.training.job import Job, OnCheckpoint, Outcome, Refusal
from actors.training.steps import COLUMNS, StepPlan
from cluster.errors import ConfigError, TrainingError
from cluster.models import StoredModel, require_signed
from cluster.progress import Sink, relayed, silent
from cluster.signing import Verifier
from cluster.storage import Home, require_file_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingResult:
    """What a completed run leaves. `adapter` is a PEFT folder in safetensors.

    Losses are means over the loss tokens of one step, in nats; `loss_tokens` counts those of all steps.
    """

    run_id: str
    steps: int
    adapter: Path
    checkpoint_id: str
    loss_first: float
    loss_last: float
    tokens_per_s: float
    loss_tokens: int


def new_run_id(name: str) -> str:
    """A run's id: the recipe's name and eight random hex digits."""
    return require_file_name(f"{name}-{uuid.uuid4().hex[:8]}", what="run id")


def untold(checkpoint_id: str, step: int, path: str, metrics: Mapping[str, float]) -> None:
    """The `on_checkpoint` of a run that nobody keeps a record of."""


def train(
    config: TrainConfig,
    *,
    name: str,
    run_id: str,
    base: StoredModel,
    data: DataVersion,
    home: Home,
    tracking_uri: str,
    tracking_run_id: str | None,
    sink: Sink = silent,
    on_checkpoint: OnCheckpoint = untold,
) -> TrainingResult:
    """Train `name` on the running Ray; a run id that has checkpoints goes on from its last.

    Raises `ConfigError` for what the user has to change, `SignatureError` if nobody who is trusted vouches for the
    base, `TrainingError` with the one-line verdict if the run failed, `KeyboardInterrupt` if Ctrl-C stopped it (its
    workers are gone by then).
    """
    # A recipe is a TrainConfig too; the workers get only the part that is training's.
    config = TrainConfig.model_validate({key: getattr(config, key) for key in TrainConfig.model_fields})
    plan = _plan(config, data)
    require_signed(base, home, Verifier())  # each worker will again; here it is told before anything is started
    workers = config.parallel.workers
    on_gpu = ray.cluster_resources().get("GPU", 0) >= workers.min
    run_folder = home.runs / require_file_name(run_id, what="run id")
    with relayed(sink) if sink is not silent else nullcontext(silent) as relay:
        job = Job(
            config=config,
            run_id=run_id,
            base=base,
            home=home,
            rows=plan.rows,
            run_folder=run_folder,
            tracking_uri=tracking_uri,
            tracking_run_id=tracking_run_id,
            sink=relay,
            on_checkpoint=on_checkpoint,
        )
        trainer = TorchTrainer(
            _work,
            train_loop_config={"job": job},
            torch_config=TorchConfig(backend="nccl" if on_gpu else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=workers.max if workers.min == workers.max else (workers.min, workers.max),
                use_gpu=on_gpu,
                resources_per_worker={"GPU": 1} if on_gpu else {"CPU": 1},
            ),
            run_config=RunConfig(
                name=run_id,
                storage_path=str(home.runs),
                checkpoint_config=CheckpointConfig(num_to_keep=config.checkpoint.keep),
                failure_config=FailureConfig(
                    max_failures=config.failures.max, max_preemption_failures=config.failures.preemptions
                ),
            ),
            datasets={"train": in_step_order(feed.dataset(data, "train", home), plan)},
            dataset_config=DataConfig(execution_options=_ordered()),
        )
        logger.info("run %s of %s: %d steps of %d rows", run_id, name, plan.steps, plan.global_batch_size)
        outcome = _fit(trainer, workers=workers.max, run_folder=run_folder)
    position = outcome.position
    return TrainingResult(
        run_id=run_id,
        steps=position.step,
        adapter=outcome.adapter,
        checkpoint_id=outcome.checkpoint_id,
        loss_first=position.loss_first,
        loss_last=position.loss_last,
        tokens_per_s=outcome.tokens_per_s,
        loss_tokens=position.loss_tokens,
    )


def in_step_order(dataset: Any, plan: StepPlan) -> Any:
    """`dataset` cut so that Ray Data deals its rows to the workers as `StepPlan.rows_of` says.

    With `preserve_order`, the splitter behind `get_dataset_shard` hands each block to the worker that has the
    fewest rows (`OutputSplitter._select_next_output_index`, ray 2.60). Blocks of exactly one micro-batch
    therefore go round the workers in turn, the same in every epoch, after every restart, at every world size.
    """
    whole_batches = dataset.select_columns(list(COLUMNS)).limit(plan.rows_per_epoch)
    return whole_batches.repartition(target_num_rows_per_block=plan.micro_batch_size, strict=True)


def _plan(config: TrainConfig, data: DataVersion) -> StepPlan:
    if data.stage != "tokens" or "train" not in data.splits:
        raise ConfigError(
            f"Data version {data.id} cannot be trained on: its stage is {data.stage}, "
            f"its splits are {', '.join(data.splits) or 'none'}.",
            hint="Prepare it first: training reads the token version of a data version with a train split.",
        )
    return StepPlan(
        rows=data.splits["train"].rows,
        steps=config.steps,
        global_batch_size=config.optimizer.global_batch_size,
        micro_batch_size=config.optimizer.micro_batch_size,
        world_size=config.parallel.workers.max,
    )


def _ordered() -> Any:
    options = DataConfig.default_ingest_options()
    options.preserve_order = True
    return options


def _work(settings: Mapping[str, Any]) -> Outcome | Refusal:
    from actors.training import loop  # torch, transformers and peft: seconds that the driver need not spend

    return loop.run(settings["job"])


def _fit(trainer: TorchTrainer, *, workers: int, run_folder: Path) -> Outcome:
    with _interruptible():
        try:
            returned: Outcome | Refusal = trainer.fit().return_value
        except TrainingFailedError as error:
            logger.debug("the fit failed", exc_info=error)
            raise verdict.explain(error, workers=workers, run_folder=run_folder) from None
    if isinstance(returned, Refusal):
        raise returned.error
    if returned is None:
        raise TrainingError("The run ended without a result.", hint="Start it again with the same run id.")
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
