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
from pathlib import Path
from typing import Protocol

import ray.train
import ray.train.torch
import torch
import torch.distributed

from actors.training import batching, checkpoint, optimizer, sharing
from actors.training import feed as feeds
from actors.training.batching import MicroBatch
from actors.training.control import ControlLink, Link, Unlinked, Wish
from actors.training.engine import Place, build
from actors.training.job import Job, Outcome, Position, Stopped, checkpoint_id
from actors.training.layout import Layout
from actors.training.ledger import Ledger, Notes
from actors.training.metrics import MetricLog
from actors.training.objectives import sft
from actors.training.order import Order
from actors.training.ray_internals import here
from actors.training.steps import StepPlan
from cluster.errors import FlywheelError, TrainingError
from cluster.models import require_signed
from cluster.progress import Progress
from cluster.signing import Verifier
from cluster.tracking import MlflowTracker

logger = logging.getLogger(__name__)


Feed = Callable[[StepPlan, int], Iterator[MicroBatch]]
"""Called with the plan and a step: the micro-batches of this worker's share from that step to the last."""


class Reporter(Protocol):
    """Where a worker's news goes. `resumed` and `checkpoint` are called on every rank, `step` on rank 0."""

    def resumed(self, position: Position, folder: Path) -> None: ...

    def step(self, position: Position, metrics: Mapping[str, float]) -> None: ...

    def checkpoint(self, position: Position, folder: Path, metrics: Mapping[str, float]) -> None: ...


def train(
    job: Job, place: Place, feed: Feed, report: Reporter, resume: Path | None, link: Link | None = None
) -> Outcome | Stopped:
    """The recipe. `resume` is the folder of a checkpoint of the same run; `link` says what the run is asked to do."""
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
    # this run has just written it, and nobody else is offered it before it is registered.)
    require_signed(job.base, job.home, Verifier())
    engine = build(config, job.base.path, job.base.name, place, layout)
    position = Position(job.run_id, step=0, rows=0, loss_first=math.nan, loss_last=math.nan, loss_tokens=0)
    if resume:
        position = checkpoint.load(resume, engine, run_id=job.run_id)
        ledger = ledger.merge(Ledger.from_json(checkpoint.read_ledger(resume)))
        report.resumed(position, resume)
        link.committed(position.step)

    batches = feed(plan, position.step)
    notes = Notes(ledger.order)
    counts = layout.reader(place.rank) == place.rank  # of the ranks that share rows, one counts them
    folder = resume
    began_s, tokens_done = time.perf_counter(), 0.0
    for step in range(position.step, plan.steps):
        step_began_s = time.perf_counter()
        rate = optimizer.learning_rate(config.optimizer, step, plan.steps)
        # The random numbers of a step depend on nothing before it, so a restart repeats its dropout exactly.
        # (Python's hash of integers is the same in every process.) Ranks that share rows share them too.
        torch.manual_seed(hash((config.seed, step, layout.data_rank(place.rank))))

        link.at("data", step)
        micro = [next(batches).to(place.device) for _ in range(plan.accumulation)]
        for batch in micro:
            if batch.origin is not None:  # this rank has read it
                notes.add(batch.origin.positions, batch.origin.rows, batch.origin.samples)
        link.at("collective", step)
        # The whole global batch is counted before the first backward: it is what each token's share is of.
        mine = [sum(map(sft.count_loss_tokens, micro)), sum(batch.tokens for batch in micro)] if counts else [0, 0]
        # What any worker has been asked to do, all do: after this very step.
        loss_tokens, tokens, *votes = _total(place, *mine, *link.votes())
        link.at("compute", step)
        if not loss_tokens:
            raise TrainingError(
                f"Step {step + 1} has no token to learn from.", hint="Check the labels of the data version."
            )
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
            folder = checkpoint.save(job.run_folder, position, engine, rank=place.rank, ledger=ledger.to_json())
            report.checkpoint(position, folder, metrics)
            link.committed(position.step)
        if wish:
            link.done()
        if wish is Wish.CHECKPOINT_AND_WAIT:
            link.stand_still(position.step, config.elastic.resize_wait_s)
        if wish is Wish.STOP and position.step < plan.steps:
            engine.close()
            return Stopped(position)
    engine.close()
    assert folder is not None  # steps >= 1, so there is a last checkpoint: saved here or resumed from
    return Outcome(
        position=position,
        checkpoint_id=checkpoint_id(job.run_id, position.step),
        adapter=folder / checkpoint.ADAPTER,
        tokens_per_s=tokens_done / max(1e-9, time.perf_counter() - began_s),
    )


def _total(place: Place, *values: float) -> list[float]:
    """Sums over all ranks, exact for counts below 2^53."""
    if place.world_size == 1:
        return list(values)
    # NCCL has float64 too; MPS, which has not, has no process groups either.
    total = torch.tensor(values, dtype=torch.float64, device=place.device)
    torch.distributed.all_reduce(total)
    return list(total.tolist())


class _RayReporter:
    """Progress to the person who waits, metrics to MLflow, checkpoints to Ray Train and the registry."""

    def __init__(self, job: Job, place: Place) -> None:
        self._job = job
        self._place = place
        self._metrics = (
            MetricLog(lambda: MlflowTracker(job.tracking_uri), job.tracking_run_id)
            if place.rank == 0 and job.tracking_run_id is not None
            else None
        )
        self._untold: list[tuple[str, int, str, dict[str, float]]] = []

    def resumed(self, position: Position, folder: Path) -> None:
        logger.info("run %s goes on after step %d", position.run_id, position.step)
        # Whoever died after this checkpoint may not have told of it.
        self._tell(position, folder, {"loss": position.loss_last})

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

    def checkpoint(self, position: Position, folder: Path, metrics: Mapping[str, float]) -> None:
        told = ray.train.Checkpoint(str(folder)) if self._place.rank == 0 else None
        # The folder already lies where Ray Train keeps the run, published in one step: nothing to copy.
        ray.train.report(
            dict(metrics), checkpoint=told, checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD
        )
        self._tell(position, folder, metrics)

    def _tell(self, position: Position, folder: Path, metrics: Mapping[str, float]) -> None:
        """Tell the registry; while it is away the news waits for the next checkpoint, and only the last insists."""
        if self._place.rank != 0:
            return
        identity = checkpoint_id(position.run_id, position.step)
        self._untold.append((identity, position.step, str(folder), dict(metrics)))
        while self._untold:
            try:
                self._job.on_checkpoint(*self._untold[0])
            except FlywheelError as error:
                if position.step == self._job.config.steps:
                    raise
                logger.warning("checkpoint %s is not yet told: %s", self._untold[0][0], error)
                return
            self._untold.pop(0)

    def close(self) -> None:
        if self._metrics:
            self._metrics.close()


def run(job: Job) -> Outcome | Stopped:
    """The training function that Ray Train runs on every worker, again after each restart of the group."""
    context = ray.train.get_context()
    place = Place(context.get_world_rank(), context.get_world_size(), ray.train.torch.get_device())
    if place.device.type == "cpu":
        wanted = job.config.parallel.threads_per_worker
        torch.set_num_threads(wanted or max(1, (os.cpu_count() or 1) // context.get_local_world_size()))

    layout = Layout.of(job.config.parallel, place.world_size)
    reads = layout.reader(place.rank) == place.rank
    dealt = feeds.opened() if reads else None  # before the model, so that its first rows come while that is loaded

    def feed(plan: StepPlan, step: int) -> Iterator[MicroBatch]:
        share = layout.data_rank(place.rank)
        own = batching.micro_batches(dealt, plan, rank=share, start=step) if dealt else None
        if layout.data == place.world_size:
            assert own is not None
            return own
        return sharing.shared(own, reader=layout.reader(place.rank), group=sharing.group(layout))

    committed = ray.train.get_checkpoint()
    report = _RayReporter(job, place)
    control = job.control
    link = ControlLink(control, rank=place.rank, node=here(), every_s=job.config.elastic.notice_s) if control else None
    try:
        # Whether another try would help is judged where all ranks' errors are seen: `ray_internals.RunWatch`.
        return train(job, place, feed, report, Path(committed.path) if committed else None, link)
    finally:
        report.close()
        if link is not None:
            link.close()
