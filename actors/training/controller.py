"""The driver's side of a training run: the feed's order, the Ray Train fit, its result or its verdict.

Knows Ray Train and Ray Data. Does not know how a worker trains (`loop`), and does not load transformers or
peft, so that the process that shows the progress stays light.
"""

import fcntl
import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig

from actors.data.version import DataVersion
from actors.training import control as controls
from actors.training import feed
from actors.training.checkpoint import manifest
from actors.training.checkpoint.storage import storage_at
from actors.training.config import TrainConfig
from actors.training.control import Incident
from actors.training.fit import fit, require_room, resources_per_worker
from actors.training.job import Job, OnCheckpoint, OnIncident, Outcome, Protected, Stopped
from actors.training.layout import Layout
from actors.training.order import Order
from actors.training.ray_internals import RunWatch, TermHandler, Torch, Trainer
from actors.training.steps import StepPlan
from cluster.errors import ConfigError, StateError
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


def unheard(incident: Incident) -> None:
    """The `on_incident` of a run that nobody keeps a record of."""


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
    protected: Protected | None = None,
    on_incident: OnIncident = unheard,
) -> TrainingResult:
    """Train `name` on the running Ray; a run id that has checkpoints goes on from its last.

    Raises `ConfigError` for what the user has to change, `CapacityError` if the cluster can never place the workers,
    `SignatureError` if nobody who is trusted vouches for the base, `TrainingError` with the one-line verdict if the
    run failed, `KeyboardInterrupt` if Ctrl-C ended it and its kind `StoppedRun` if SIGTERM did (its workers are gone
    by then).
    """
    # A recipe is a TrainConfig too; the workers get only the part that is training's.
    config = TrainConfig.model_validate({key: getattr(config, key) for key in TrainConfig.model_fields})
    plan = planned(config, data)
    order = Order.of(plan, seed=config.seed, shuffle=config.shuffle)
    require_signed(base, home, Verifier())  # each worker will again; here it is told before anything is started
    workers = config.parallel.workers
    per_worker = resources_per_worker(config)
    on_gpu = "GPU" in per_worker
    require_room(config, per_worker)
    run_folder = home.runs / require_file_name(run_id, what="run id")
    storage = storage_at(run_folder, run_id, config.checkpoint.storage)
    elastic = workers.min != workers.max
    with (
        _sole_driver(run_folder),
        relayed(sink) if sink is not silent else nullcontext(silent) as relay,
        controls.running(run_id, committed=manifest.next_step(storage)) as control,
    ):
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
            protected=protected,
            control=control,
        )
        trainer = Trainer(
            _work,
            train_loop_config={"job": job},
            torch_config=Torch(backend="nccl" if on_gpu else "gloo", timeout_s=config.elastic.collective_timeout_s),
            scaling_config=ScalingConfig(
                num_workers=(workers.min, workers.max) if elastic else workers.max,
                elastic_resize_monitor_interval_s=config.elastic.regrow_s,
                use_gpu=on_gpu,
                resources_per_worker=per_worker,
            ),
            run_config=RunConfig(
                name=run_id,
                storage_path=str(home.runs),
                failure_config=FailureConfig(
                    max_failures=config.failures.max, max_preemption_failures=config.failures.preemptions
                ),
                callbacks=[
                    TermHandler(),
                    RunWatch(
                        control,
                        config.elastic,
                        workers=workers.min,
                        elastic=elastic,
                        run_folder=str(run_folder),
                        on_incident=on_incident,
                    ),
                ],
            ),
            datasets={feed.NAME: feed.Stream.of(data, home, plan, order, partial(manifest.next_step, storage))},
            dataset_config=feed.Dealing(config.parallel),
        )
        logger.info("run %s of %s: %d steps of %d rows", run_id, name, plan.steps, plan.global_batch_size)
        outcome = fit(trainer, control, config, run_folder)
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


def planned(config: TrainConfig, data: DataVersion) -> StepPlan:
    """The steps of a run of `config` on `data`; `ConfigError` if it cannot be trained on, or has too few rows."""
    if data.stage != "tokens" or "train" not in data.splits:
        raise ConfigError(
            f"Data version {data.id} cannot be trained on: its stage is {data.stage}, "
            f"its splits are {', '.join(data.splits) or 'none'}.",
            hint="Prepare it first: training reads the token version of a data version with a train split.",
        )
    wanted = {"sft": "chat", "contrastive": "pairs"}[config.objective.kind]
    if data.shape != wanted:
        raise ConfigError(
            f"Data version {data.id} holds {data.shape}; objective {config.objective.kind} learns from {wanted}.",
            hint="Set objective.kind to what the data is for, or data.train.source to other data.",
        )
    return StepPlan(
        rows=data.splits["train"].rows,
        steps=config.steps,
        global_batch_size=config.optimizer.global_batch_size,
        micro_batch_size=config.optimizer.micro_batch_size,
        world_size=Layout.of(config.parallel, config.parallel.workers.max).data,
    )


@contextmanager
def _sole_driver(run_folder: Path) -> Iterator[None]:
    """`StateError` if another process trains the run now, also one on a Ray of its own: two would write over another.

    The kernel lets go of the lock when its holder dies.
    """
    run_folder.mkdir(parents=True, exist_ok=True)
    with (run_folder / ".driver").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateError(
                f"Run {run_folder.name!r} is being trained by another process.", hint="Wait for it, or stop it."
            ) from None
        yield


def _work(settings: Mapping[str, Any]) -> Outcome | Stopped:
    job: Job = settings["job"]
    called_at = time.time()
    dealt = feed.opened(job.config.parallel)
    from actors.training import loop  # torch, transformers and peft: seconds that the driver need not spend

    return loop.run(job, dealt, called_at)
