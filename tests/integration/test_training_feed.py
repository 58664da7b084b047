"""The feed on real Ray Train and Ray Data: a group that restarts, or has another size, gets exactly what is left.

The workers train nothing. They note the rows they get, commit now and then, and die once.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from actors.data.build import build
from actors.data.config import DataConfig, SourceConfig
from actors.data.prepare import prepare
from actors.training import batching, feed, sharing
from actors.training.audit import sample_facts
from actors.training.batching import MicroBatch
from actors.training.config import ParallelConfig
from actors.training.layout import Layout
from actors.training.ledger import Ledger, Notes, audit
from actors.training.order import Order
from actors.training.steps import StepPlan
from cluster.session import Session
from cluster.storage import Home
from tests.actors.training.small import packed_rows

pytestmark = pytest.mark.integration

ROWS, STEPS, BATCH, EVERY = 29, 14, 4, 2  # an epoch is 7 steps
SPLIT = (7, 22)  # rows of the files, of which none ends where a batch ends


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Begun:
    """Where a run stands: what its last commit says. Notes each question, as Ray Train asks once for each group."""

    folder: Path

    def __call__(self) -> int:
        step, _ = committed(self.folder)
        with (self.folder / "asked").open("a") as file:
            file.write(f"{step}\n")
        return step


def committed(folder: Path) -> tuple[int, Ledger]:
    path = folder / "committed.json"
    if not path.exists():
        return 0, Ledger(order())
    facts = json.loads(path.read_text())
    return facts["step"], Ledger.from_json(facts["ledger"])


def plan(shares: int) -> StepPlan:
    return StepPlan(rows=ROWS, steps=STEPS, global_batch_size=BATCH, micro_batch_size=1, world_size=shares)


def order() -> Order:
    whole = Order.of(plan(1), seed=5, shuffle=True)
    return Order(whole.rows, whole.epoch_rows, whole.seed, chunk_rows=4, window_chunks=2)


def work(settings: Mapping[str, Any]) -> None:
    """A worker: what `loop.run` and `loop.train` do with rows, without a model."""
    folder, parallel = settings["folder"], settings["parallel"]
    context = ray.train.get_context()
    rank = context.get_world_rank()
    layout = Layout.of(parallel, context.get_world_size())
    dealt = feed.opened(parallel)
    step, ledger = committed(folder)
    spread, notes = plan(layout.data), Notes(order())
    batches: Iterator[MicroBatch] | None = None
    if dealt is not None:
        batches = batching.micro_batches(dealt, spread, rank=layout.data_rank(rank), start=step)
    if layout.data < layout.world_size:
        batches = sharing.shared(batches, reader=layout.reader(rank), group=sharing.group(layout))
    assert batches is not None
    for number in range(step, settings["until"]):
        for _ in range(spread.accumulation):
            batch = next(batches)
            with (folder / f"got-{os.getpid()}-{rank}").open("a") as file:
                file.write(json.dumps([number, layout.data, batch.input_ids[0].tolist()]) + "\n")
            if batch.origin is not None:
                notes.add(batch.origin.positions, batch.origin.rows, batch.origin.samples)
        if number == settings["die_in"] and rank == 0 and not (folder / "died").exists():
            (folder / "died").touch()
            os._exit(1)
        if (number + 1) % EVERY == 0:
            segments = sharing.gathered(notes.take(), rank=rank, world_size=layout.world_size)
            if rank == 0:
                ledger = ledger.merge_all(segments)
                facts = json.dumps({"step": number + 1, "ledger": ledger.to_json()})
                (folder / "committed.tmp").write_text(facts)
                (folder / "committed.tmp").rename(folder / "committed.json")


def run(folder: Path, files: tuple[Path, ...], parallel: ParallelConfig, *, until: int, die_in: int = -1) -> None:
    stream = feed.Stream(files, SPLIT, order(), STEPS, BATCH, Begun(folder))
    TorchTrainer(
        work,
        train_loop_config={"folder": folder, "parallel": parallel, "until": until, "die_in": die_in},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=parallel.workers.max, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="feed", storage_path=str(folder), failure_config=FailureConfig(max_failures=1)),
        datasets={feed.NAME: stream},
        dataset_config=feed.Dealing(parallel),
    ).fit()


@pytest.mark.chaos
def test_what_is_left_is_dealt_after_a_crash_and_at_another_size(ray_session: Session, tmp_path: Path) -> None:
    table = packed_rows(ROWS, length=24, seed=7)
    files = (tmp_path / "train-0.parquet", tmp_path / "train-1.parquet")
    pq.write_table(table.slice(0, SPLIT[0]), files[0], row_group_size=3)
    pq.write_table(table.slice(SPLIT[0]), files[1], row_group_size=5)

    # Two workers with rows of their own; one dies in step 5, of which step 4 is committed.
    run(tmp_path, files, ParallelConfig(workers={"min": 2, "max": 2}), until=8, die_in=5)  # type: ignore[arg-type]
    assert (tmp_path / "asked").read_text().split() == ["0", "4"]
    # On another day two workers share one replica: one of them reads.
    run(tmp_path, files, ParallelConfig(tensor=2, workers={"min": 2, "max": 2}), until=STEPS)  # type: ignore[arg-type]
    assert (tmp_path / "asked").read_text().split() == ["0", "4", "8"]

    step, ledger = committed(tmp_path)
    found = audit(ledger, order(), step=step, batch=BATCH)
    assert (step, found.seen, found.lost, found.repeated, found.proven) == (STEPS, STEPS * BATCH, 0, 0, True)
    assert_rows(tmp_path, table)


def assert_rows(folder: Path, table: pa.Table) -> None:
    """Every group got the rows of its steps: those of the order, whoever got them."""
    tokens = table.column("input_ids").to_pylist()
    got: dict[tuple[int, int], list[list[int]]] = {}
    for path in sorted(folder.glob("got-*")):
        for line in path.read_text().splitlines():
            step, shares, ids = json.loads(line)
            got.setdefault((step, shares), []).append(ids)
    assert {step for step, shares in got if shares == 2} == set(range(8))
    assert {step for step, shares in got if shares == 1} == set(range(8, STEPS))
    for (step, _), rows in got.items():
        expected = [tokens[row] for row in order().rows_at(step * BATCH, (step + 1) * BATCH)]
        # Steps 4 and 5 were done twice, and on two ranks that share a replica each row arrives twice.
        assert {tuple(row) for row in rows} == {tuple(row) for row in expected}
        assert len(rows) in (BATCH, 2 * BATCH, 2 * BATCH - 1)


def test_a_position_in_packed_rows_is_a_position_in_samples(ray_session: Session, tmp_path: Path) -> None:
    """On a version that was really prepared: packed once, so that whoever goes on finds its samples without packing."""
    home = Home(tmp_path / "home")
    source = tmp_path / "sums.jsonl"
    source.write_text("\n".join(json.dumps({"prompt": f"{n} + {n}", "completion": str(2 * n)}) for n in range(300)))
    config = DataConfig(train=SourceConfig(source=str(source)), max_length=256)
    tokens = prepare(build(str(source), config, home), config, tokenizer(tmp_path / "tokenizer"), home)

    facts = sample_facts(tokens, home)
    assert facts.counts.sum() == tokens.splits["train"].examples
    assert facts.counts.max() > 2  # it is packed
    rows = tokens.splits["train"].rows
    spread = StepPlan(rows=rows, steps=3 * rows, global_batch_size=1, micro_batch_size=1, world_size=1)
    whole = Order.of(spread, seed=0, shuffle=True)

    # An epoch is cut anywhere: what was taken before and what is left are all samples of the split, each once.
    cut = rows // 3
    taken = [samples(feed.Stream.of(tokens, home, spread, whole, int), *part) for part in ((0, cut), (cut, rows))]
    every = [sample for part in taken for sample in part]
    assert len(every) == len(set(every)) == tokens.splits["train"].examples
    assert not set(taken[0]) & set(taken[1])

    notes = Notes(whole)
    for batch in batches(feed.Stream.of(tokens, home, spread, whole, int), spread, cut, 2 * rows):
        assert batch.origin is not None
        notes.add(batch.origin.positions, batch.origin.rows, batch.origin.samples)
    later = notes.take()
    assert later.epochs[1].samples == tokens.splits["train"].examples
    found = audit(later, whole, step=2 * rows, batch=1, samples=facts)
    assert (found.lost, found.repeated, found.proven) == (cut, 0, True)


def samples(stream: feed.Stream, begin: int, end: int) -> list[str]:
    """The ids in the rows at these positions."""
    read = [part.column("sample_ids").to_pylist() for part in shares(stream, begin, end)]
    return [sample for part in read for row in part for sample in row]


def batches(stream: feed.Stream, spread: StepPlan, begin: int, end: int) -> Iterator[MicroBatch]:
    until = replace(spread, steps=end)
    return batching.micro_batches(shares(stream, begin, end), until, rank=0, start=begin)


def shares(stream: feed.Stream, begin: int, end: int) -> Iterator[pa.Table]:
    return (part for whole in feed._read(stream, begin, end, 1) for part in feed.rows_of(whole))


def tokenizer(folder: Path) -> Path:
    """One of bytes, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        ["user assistant"], trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    )
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, additional_special_tokens=special, eos_token="<|im_end|>")
    made.chat_template = CHATML
    made.save_pretrained(folder)
    return folder
