"""`flywheel bench train`: the speed of LoRA fine-tuning, beside TRL's, and what Ray costs.

Two contests on the same packed rows, each between two processes that run by turns (`turns`):

    engine   the training loop as users get it (feed of tables, engine, metrics) without Ray, against TRL's SFTTrainer
    path     the whole of `flywheel train` on Ray Train and Ray Data, against a bare loop in torch on the same tensors

Same base weights, rows, order, batch, precision (bf16 base, fp32 adapters of rank 16 on all linear layers), threads,
loss on completions only, no activation checkpointing. What is otherwise TRL's default stays as it is.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from actors.data.packing import NO_LOSS
from actors.data.version import DataVersion, ShardManifest, SplitManifest
from actors.training.config import TrainConfig
from actors.training.job import Job, Position
from actors.training.steps import POSITION, StepPlan
from app.bench.homes import beside
from app.bench.report import Bar, Report, Result, report
from app.bench.turns import Referee, Ticket, Turn
from cluster import environment
from cluster.errors import DependencyError
from cluster.models import StoredModel, obtain
from cluster.progress import Carried, Progress, Sink, relayed, silent
from cluster.storage import Home

BASE: Final = "smollm2-135m-instruct"
CONTESTS: Final = ("engine", "path")
AT_LEAST: Final = 1.3
"""Tokens per second of our engine over TRL's."""
AT_MOST: Final = 1.03
"""Step time on Ray over that of a bare loop."""
_ROWS: Final = 64


@dataclass(frozen=True)
class Size:
    """`batch` rows of `length` tokens in one forward; examples of some `example` tokens, a third of them completion.

    A turn is `steps` steps, and each of two competitors has `runs` of them.
    """

    batch: int = 4
    length: int = 512
    example: int = 64
    steps: int = 3
    runs: int = 5
    threads: int = os.cpu_count() or 1

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.batch * self.length

    @property
    def marks(self) -> int:
        """Steps of a competitor in all: one before its first turn, one that does not count, its turns."""
        return 2 + self.runs * self.steps

    def config(self) -> TrainConfig:
        """What our side is told."""
        return TrainConfig.model_validate(
            {
                "parallel": {"threads_per_worker": self.threads},
                "optimizer": {"global_batch_size": self.batch, "micro_batch_size": self.batch},
                "checkpoint": {"every_steps": 10**6},
                # A competitor that waits for its turn is not stuck.
                "elastic": {"stuck_after_s": 36_000},
                "shuffle": False,
                "steps": self.marks,
            }
        )


def run(size: Size, sink: Sink, *, base: str = BASE, contests: tuple[str, ...] = CONTESTS) -> Report:
    """Hold both contests; each competitor needs up to 4 GiB."""
    model = obtain(base, Home.current())
    rows = packed(size, vocabulary(model))
    results, bars = [], []
    for number, contest in enumerate(contests):
        sink(Progress("bench", number, len(contests), "contests", note=contest))
        with tempfile.TemporaryDirectory(prefix="flywheel-bench-") as scratch, Referee() as referee:
            home = beside(Home.current(), Path(scratch))
            if contest == "engine":
                _require_trl()
                referee.admit("ours", play_ours, model, home, rows, size)
                referee.admit("trl", play_trl, model, home, rows, size)
                measured, bar = compare_engines(size, referee.rounds("ours", "trl", runs=size.runs, steps=size.steps))
                apart = abs(referee.said["ours"] / referee.said["trl"] - 1)
                measured.append(Result.of("engine: first losses differ by", "of the loss", [apart]))
            else:
                referee.admit("bare", play_bare, model, rows, size)
                referee.admit("ray", play_ray, model, home, rows, size, ends_itself=True)
                measured, bar = compare_path(referee.rounds("ray", "bare", runs=size.runs, steps=size.steps))
        results += measured
        bars.append(bar)
    return report("train", size.runs, results, bars)


def compare_engines(size: Size, pairs: list[tuple[Turn, Turn]]) -> tuple[list[Result], Bar]:
    """The figures of `pairs` of turns, ours and TRL's."""

    def speed(turn: Turn) -> float:
        return size.tokens * turn.steps / turn.wall_s

    ratio = Result.of("engine: ours over trl", "ratio", [speed(ours) / speed(trl) for ours, trl in pairs])
    cpu = Result.of("engine: CPU of trl over ours", "ratio", [trl.cpu_s / ours.cpu_s for ours, trl in pairs])
    return [
        Result.of("engine: ours", "tokens/s", [speed(ours) for ours, _ in pairs]),
        Result.of("engine: trl", "tokens/s", [speed(trl) for _, trl in pairs]),
        ratio,
        cpu,
    ], Bar.at_least(ratio, AT_LEAST)


def compare_path(pairs: list[tuple[Turn, Turn]]) -> tuple[list[Result], Bar]:
    """The figures of `pairs` of turns, on Ray and bare."""
    ratio = Result.of("path: ray over bare", "ratio", [ray.wall_s / bare.wall_s for ray, bare in pairs])
    return [
        Result.of("path: ray", "s a step", [ray.wall_s / ray.steps for ray, _ in pairs]),
        Result.of("path: bare", "s a step", [bare.wall_s / bare.steps for _, bare in pairs]),
        ratio,
        Result.of("path: CPU of ray's worker over bare", "ratio", [ray.cpu_s / bare.cpu_s for ray, bare in pairs]),
    ], Bar.at_most(ratio, AT_MOST)


def packed(size: Size, words: int) -> pa.Table:
    """Random rows, full to the last token, of examples between half and one and a half times `size.example` long."""
    draw = np.random.default_rng(0)
    columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "position_ids": []}
    for _ in range(max(_ROWS, size.batch)):
        ids = draw.integers(3, words, size.length)
        labels, positions = ids.copy(), np.zeros(size.length, int)
        at = 0
        while at < size.length:
            end = at + int(draw.integers(max(3, size.example // 2), size.example * 3 // 2 + 3))
            if end + 3 > size.length:  # what is left would be too short for a prompt and its completion
                end = size.length
            labels[at : at + (end - at) * 2 // 3] = NO_LOSS
            positions[at:end] = np.arange(end - at)
            at = end
        for name, values in zip(columns, (ids, labels, positions), strict=True):
            columns[name].append(values.tolist())
    count = len(columns["labels"])
    arrays = {name: pa.array(values, pa.list_(pa.int32())) for name, values in columns.items()}
    return pa.table(
        arrays | {"sample_ids": [[f"sample-{row}"] for row in range(count)], "row": pa.array(range(count), pa.int64())}
    )


def vocabulary(model: StoredModel) -> int:
    """Entries of the model's embedding."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model.path).vocab_size)


def play_ours(ticket: Ticket, model: StoredModel, home: Home, rows: pa.Table, size: Size) -> None:
    """The loop of a training worker, in this process."""
    import torch

    from actors.training import batching
    from actors.training.batching import MicroBatch
    from actors.training.engine import Place
    from actors.training.loop import train

    torch.set_num_threads(size.threads)

    def feed(plan: StepPlan, step: int) -> Iterator[MicroBatch]:
        return batching.micro_batches(_shares(rows, plan), plan, rank=0, start=step)

    job = Job(
        config=size.config(),
        run_id="bench",
        base=model,
        home=home,
        rows=rows.num_rows,
        run_folder=home.runs / "bench",
        tracking_uri="",
        tracking_run_id=None,
        sink=silent,
        on_checkpoint=_untold,
    )
    train(job, Place(0, 1, torch.device("cpu")), feed, _Marking(ticket))


class _Marking:
    """A `Reporter` that marks the end of every step."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def resumed(self, position: Position) -> None: ...

    def step(self, position: Position, metrics: Mapping[str, float]) -> None:  # noqa: ARG002 (the protocol's)
        self._ticket.mark(metrics["loss"])

    def checkpoint(self, position: Position, uri: str, metrics: Mapping[str, float]) -> None: ...


def play_trl(ticket: Ticket, model: StoredModel, home: Home, rows: pa.Table, size: Size) -> None:
    """TRL's SFTTrainer on rows that are tokenized and packed, as its own packing would hand them on."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(size.threads)
    ours = size.config()

    class Marking(TrainerCallback):  # type: ignore[misc, unused-ignore]
        """Marks from one beginning of a step to the next, so that all that is done for a step is in it."""

        loss = 0.0

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
            self.loss = logs.get("loss", self.loss)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            if state.global_step:
                ticket.mark(self.loss)

    config = SFTConfig(
        output_dir=str(home.root / "trl"),
        use_cpu=True,
        bf16=True,
        model_init_kwargs={"dtype": torch.bfloat16},
        packing=True,
        max_length=size.length,
        dataset_kwargs={"skip_prepare_dataset": True},
        completion_only_loss=True,
        train_sampling_strategy="sequential",
        per_device_train_batch_size=size.batch,
        max_steps=size.marks + 1,
        learning_rate=ours.optimizer.learning_rate,
        lr_scheduler_type=ours.optimizer.schedule,
        max_grad_norm=ours.optimizer.max_grad_norm,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    lora = LoraConfig(
        r=ours.adapter.r, lora_alpha=ours.adapter.alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    dataset = Dataset.from_dict(
        {
            "input_ids": rows.column("input_ids").to_pylist(),
            "labels": rows.column("labels").to_pylist(),
            "seq_lengths": [_lengths(positions) for positions in rows.column("position_ids").to_pylist()],
        }
    )
    trainer = SFTTrainer(
        model=str(model.path), args=config, train_dataset=dataset, peft_config=lora, callbacks=[Marking()]
    )
    trainer.train()


def _lengths(positions: list[int]) -> list[int]:
    starts = [place for place, position in enumerate(positions) if position == 0] + [len(positions)]
    return [end - begin for begin, end in pairwise(starts)]


def play_bare(ticket: Ticket, model: StoredModel, rows: pa.Table, size: Size) -> None:
    """A loop that anybody would write around the same model and loss: no feed, no metrics, no checkpoints."""
    import torch

    from actors.training import adapter, objectives
    from actors.training.batching import MicroBatch
    from actors.training.objectives.sft import count_loss_tokens

    torch.set_num_threads(size.threads)
    config = size.config()
    trained = adapter.trainable(config, model.path, model.name, torch.device("cpu"))
    objective = objectives.build(config, trained)
    objective.train()
    learning = list(adapter.learning(trained).values())
    adamw = torch.optim.AdamW(learning, lr=config.optimizer.learning_rate, weight_decay=0.0)
    plan = _plan(rows, size)
    batches = [MicroBatch.from_arrow(share) for share in _shares(rows, plan)]
    for batch in batches:
        loss = objective(batch.input_ids, batch.labels, batch.position_ids) / count_loss_tokens(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learning, config.optimizer.max_grad_norm)
        adamw.step()
        adamw.zero_grad()
        ticket.mark(loss.item())


def play_ray(ticket: Ticket, model: StoredModel, home: Home, rows: pa.Table, size: Size) -> None:
    """What `flywheel train` runs, without tracker and registry, on a Ray of its own."""
    for named in (environment.RAY_ADDRESS, environment.DATABASE_URI, environment.TRACKING_URI):
        os.environ.pop(named, None)
    os.environ[environment.HOME] = str(home.root)
    environment.prepare(home.root)

    from actors.training.controller import train
    from cluster.session import connect

    data = _version(rows, home)
    with connect(), relayed(silent) as told:
        train(
            size.config(),
            name="bench",
            run_id="bench-path",
            base=model,
            data=data,
            home=home,
            tracking_uri="",
            tracking_run_id=None,
            sink=_MarkingSink(told, ticket),
        )


class _MarkingSink(Carried):
    """Tells the driver of a step as every run does, and then marks its end."""

    def __init__(self, told: Sink, ticket: Ticket) -> None:
        self._told = told
        self._ticket = ticket

    def __call__(self, progress: Progress) -> None:
        self._told(progress)
        self._ticket.mark()


def _plan(rows: pa.Table, size: Size) -> StepPlan:
    return StepPlan(
        rows=rows.num_rows,
        steps=size.marks,
        global_batch_size=size.batch,
        micro_batch_size=size.batch,
        world_size=1,
    )


def _shares(rows: pa.Table, plan: StepPlan) -> Iterator[pa.Table]:
    """The rows of each step, in their order, epoch after epoch."""
    for step in range(plan.steps):
        first = plan.first(step)
        within = first % plan.rows_per_epoch
        positions = pa.array(range(first, first + plan.share), pa.int64())
        yield rows.slice(within, plan.share).append_column(POSITION, positions)


def _version(rows: pa.Table, home: Home) -> DataVersion:
    shard = ShardManifest(file="train-00000.parquet", rows=rows.num_rows, sha256="")
    version = DataVersion(
        name="bench", digest="be" * 32, stage="tokens", shape="chat", parent=None,
        splits={"train": SplitManifest(rows=rows.num_rows, groups=1, files=(shard,))},
        quarantined={}, dropped={}, config={}, fingerprint="", created_at=time.strftime("%Y-%m-%dT%H:%M:%SZ"),
    )  # fmt: skip
    version.folder(home).mkdir(parents=True)
    pq.write_table(rows, version.folder(home) / shard.file)
    return version


def _untold(_identity: str, _step: int, _uri: str, _metrics: Mapping[str, float]) -> None: ...


def _require_trl() -> None:
    try:
        import trl  # noqa: F401
    except ImportError as error:
        raise DependencyError(
            f"TRL, which the bench compares with, is not installed: {error}.",
            hint="Run `make setup`, or bench the path alone.",
            retryable=False,
        ) from None
