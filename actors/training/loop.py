"""What every training worker does, from base model to last checkpoint. `train` is the recipe; read it first.

The recipe knows neither Ray nor MLflow: it gets a feed and a `Reporter`. `run` at the end of the file is the
shell that Ray Train calls. Every rank runs the same code in the same order; only rank 0 speaks and writes.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import ray.train
import ray.train.torch
import torch
import torch.distributed

from actors.training import adapter, batching, objectives, optimizer, sharing
from actors.training.batching import MicroBatch
from actors.training.checkpoint import export
from actors.training.checkpoint.saver import Checkpoints, ModelFacts
from actors.training.checkpoint.storage import storage_at
from actors.training.control import ControlLink, Link, Unlinked, Wish
from actors.training.engine import Place, build
from actors.training.job import Job, Outcome, Position, Stopped, checkpoint_id
from actors.training.layout import Layout
from actors.training.ledger import Ledger, Notes
from actors.training.metrics import MetricLog
from actors.training.order import Order
from actors.training.ray_internals import here
from actors.training.steps import StepPlan
from cluster.errors import TrainingError
from cluster.models import require_signed
from cluster.progress import Progress
from cluster.signing import Verifier
from cluster.tracking import MlflowTracker

logger = logging.getLogger(__name__)


Feed = Callable[[StepPlan, int], Iterator[MicroBatch]]
"""Called with the plan and a step: the micro-batches of this worker's share from that step to the last."""


class Reporter(Protocol):
    """Where a worker's news goes. `resumed` is called on every rank, the others on rank 0.

    `checkpoint` is called in another thread than the loop's, once a checkpoint is durable, with its path or URI. It is
    called again later if it raises a `FlywheelError`, and may be called twice for the same one.
    """

    def resumed(self, position: Position) -> None: ...

    def step(self, position: Position, metrics: Mapping[str, float]) -> None: ...

    def checkpoint(self, position: Position, uri: str, metrics: Mapping[str, float]) -> None: ...


def train(job: Job, place: Place, feed: Feed, report: Reporter, link: Link | None = None) -> Outcome | Stopped:
    """The recipe. A run that has checkpoints goes on from its last good one; `link` says what it is asked to do."""
    link = link or Unlinked()
    config = job.config
    layout = Layout.of(config.parallel, place.world_size)
    plan = StepPlan(
        rows=job.rows,
        steps=config.steps,
        global_batch_size=config.optimizer.global_batch_size,
        micro_batch_size=config.optimizer.micro_batch_size,
        world_size=layout.data,
    )
    ledger = Ledger(Order.of(plan, seed=config.seed, shuffle=config.shuffle))
    # Not in the driver alone: what counts is what this machine reads. (A checkpoint has no signature and needs none:
    # this run has written it itself, its digests say so, and nobody else is offered it before it is registered.)
    require_signed(job.base, job.home, Verifier())
    engine = build(config, job.base.path, job.base.name, place, layout)
    position = Position(job.run_id, step=0, rows=0, loss_first=math.nan, loss_last=math.nan, loss_tokens=0)
    storage = storage_at(job.run_folder, job.run_id, config.checkpoint.storage)
    checkpoints = Checkpoints(
        storage,
        run_id=job.run_id,
        policy=config.checkpoint,
        rank=place.rank,
        world_size=place.world_size,
        model=_facts(job, engine.model),
        durable=link.committed,
        on_commit=report.checkpoint,
        protected=job.protected,
    )
    state = engine.state()
    resumed = checkpoints.resume(state)
    if resumed is not None:
        engine.load(state, resumed.position.step)
        position = resumed.position
        ledger = ledger.merge(Ledger.from_json(resumed.ledger))
        report.resumed(position)
    del state

    batches = feed(plan, position.step)
    notes = Notes(ledger.order)
    counts = layout.reader(place.rank) == place.rank  # of the ranks that share rows, one counts them
    terms = objectives.count_terms(config)
    drawer = layout.drawer(place.rank)
    began_s, tokens_done = time.perf_counter(), 0.0
    for step in range(position.step, plan.steps):
        step_began_s = time.perf_counter()
        rate = optimizer.learning_rate(config.optimizer, step, plan.steps)
        # The random numbers of a step depend on nothing before it, so a restart repeats its dropout exactly.
        # (Python's hash of integers is the same in every process.)
        _seed(place.device, hash((config.seed, step, *drawer)))

        link.at("data", step)
        micro = [next(batches) for _ in range(plan.accumulation)]
        for batch in micro:
            if batch.origin is not None:  # this rank has read it
                notes.add(batch.origin.positions, batch.origin.rows, batch.origin.samples)
        link.at("collective", step)
        # The whole global batch is counted before the first backward: it is what each token's share is of.
        # And before it is on the device, which would be waited for.
        mine = [sum(map(terms, micro)), sum(batch.tokens for batch in micro)] if counts else [0, 0]
        # What any worker has been asked to do, all do: after this very step.
        loss_tokens, tokens, *votes = _total(place, *mine, *link.votes())
        link.at("compute", step)
        if not loss_tokens:
            raise TrainingError(
                f"Step {step + 1} has no token to learn from.", hint="Check the labels of the data version."
            )
        micro = [batch.to(place.device) for batch in micro]
        result = engine.step(micro, loss_tokens=loss_tokens, learning_rate=rate)
        norm = result.grad_norm
        link.at("collective", step)
        mean = _total(place, result.loss_sum)[0] / loss_tokens
        if not math.isfinite(mean) or not math.isfinite(norm):
            raise TrainingError(
                f"The loss became {mean} (gradient norm {norm}) at step {step + 1}.",
                hint="Lower optimizer.learning_rate, lengthen optimizer.warmup_ratio, or use precision=fp32.",
            )
        now_s = time.perf_counter()
        tokens_done += tokens
        metrics = {
            "loss": mean,
            "learning_rate": rate,
            "grad_norm": norm,
            "epoch": (step + 1) / plan.steps_per_epoch,
            "loss_tokens": loss_tokens,
            "tokens_per_s": tokens / (now_s - step_began_s),
            **checkpoints.take_metrics(),
        }
        position = replace(
            position,
            step=step + 1,
            rows=(step + 1) * plan.global_batch_size,
            loss_first=mean if step == 0 else position.loss_first,
            loss_last=mean,
            loss_tokens=position.loss_tokens + int(loss_tokens),
        )
        link.at("compute", position.step)
        if place.rank == 0:
            report.step(position, metrics)
        wish = link.agreed(votes)
        if wish or position.step % config.checkpoint.every_steps == 0 or position.step == plan.steps:
            link.at("checkpoint", position.step)
            ledger = ledger.merge_all(sharing.gathered(notes.take(), rank=place.rank, world_size=place.world_size))
            checkpoints.save(engine.state(), position, ledger=ledger.to_json(), metrics=metrics)
        if wish:
            checkpoints.finish(insist=wish is Wish.STOP)
            link.done()
        if wish is Wish.CHECKPOINT_AND_WAIT:
            link.stand_still(position.step, config.elastic.resize_wait_s)
        if wish is Wish.STOP and position.step < plan.steps:
            engine.close()
            return Stopped(position)
    tokens_per_s = tokens_done / max(1e-9, time.perf_counter() - began_s)
    checkpoints.finish(insist=True)
    engine.close()
    return Outcome(
        position=position,
        checkpoint_id=checkpoint_id(job.run_id, position.step),
        adapter=export.artifact(storage, position, job.run_folder, job.base.path, write=place.rank == 0),
        tokens_per_s=tokens_per_s,
    )


def _seed(device: torch.device, value: int) -> None:
    """As `torch.manual_seed`, which besides formats a stack trace for each kind of device that is not in use."""
    torch.default_generator.manual_seed(value)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(value)


def _facts(job: Job, model: Any) -> ModelFacts:
    config = None if job.config.adapter.kind == "none" else adapter.config_text(model)
    return ModelFacts("model" if config is None else "adapter", job.base.name, job.base.digest, config)


def _total(place: Place, *values: float) -> list[float]:
    """Sums over all ranks, exact for counts below 2^53."""
    if place.world_size == 1:
        return list(values)
    # NCCL has float64 too; MPS, which has not, has no process groups either.
    total = torch.tensor(values, dtype=torch.float64, device=place.device)
    torch.distributed.all_reduce(total)
    return list(total.tolist())


class _RayReporter:
    """Progress to the person who waits, metrics to MLflow, checkpoints to the registry.

    Ray Train is told of none: it would keep and delete them by its own rule, go on from the last that its controller
    has seen, and refuse to take up a run again once one of those that it was told of is gone.
    """

    def __init__(self, job: Job, place: Place) -> None:
        self._job = job
        self._place = place
        self._metrics = (
            MetricLog(lambda: MlflowTracker(job.tracking_uri), job.tracking_run_id)
            if place.rank == 0 and job.tracking_run_id is not None
            else None
        )

    def resumed(self, position: Position) -> None:
        logger.info("run %s goes on after step %d", position.run_id, position.step)

    def step(self, position: Position, metrics: Mapping[str, float]) -> None:
        if self._metrics:
            self._metrics.log(position.step, metrics)
        self._job.sink(
            Progress(
                stage="train",
                done=position.step,
                total=self._job.config.steps,
                rate=metrics["tokens_per_s"],
                note=f"loss {metrics['loss']:.3f}",
            )
        )

    def checkpoint(self, position: Position, uri: str, metrics: Mapping[str, float]) -> None:
        self._job.on_checkpoint(checkpoint_id(position.run_id, position.step), position.step, uri, metrics)

    def close(self) -> None:
        if self._metrics:
            self._metrics.close()


def run(job: Job, dealt: Iterator[Any] | None, called_at: float | None = None) -> Outcome | Stopped:
    """The training function that Ray Train runs on every worker, again after each restart of the group.

    `dealt` gives this worker's share of each step, as tables; None if it gets its rows from another worker.
    `called_at`: when (`time.time`) Ray Train called this worker.
    """
    context = ray.train.get_context()
    place = Place(context.get_world_rank(), context.get_world_size(), ray.train.torch.get_device())
    if place.device.type == "cpu":
        wanted = job.config.parallel.threads_per_worker
        torch.set_num_threads(wanted or max(1, (os.cpu_count() or 1) // context.get_local_world_size()))

    layout = Layout.of(job.config.parallel, place.world_size)

    def feed(plan: StepPlan, step: int) -> Iterator[MicroBatch]:
        share = layout.data_rank(place.rank)
        own = batching.micro_batches(dealt, plan, rank=share, start=step) if dealt else None
        if layout.data == place.world_size:
            assert own is not None
            return own
        return sharing.shared(own, reader=layout.reader(place.rank), group=sharing.group(layout))

    report = _RayReporter(job, place)
    control = job.control
    every_s = job.config.elastic.notice_s
    link = ControlLink(control, rank=place.rank, node=here(), every_s=every_s, called_at=called_at) if control else None
    try:
        # Whether another try would help is judged where all ranks' errors are seen: `ray_internals.RunWatch`.
        return train(job, place, feed, report, link)
    finally:
        report.close()
        if link is not None:
            link.close()
