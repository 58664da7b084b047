"""A contrastive step is that of one process with the whole global batch, however it is shared and cut."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses

from actors.training import embedder, optimizer
from actors.training.batching import MicroBatch
from actors.training.config import ContrastiveConfig, TrainConfig
from actors.training.engine import Place, build
from actors.training.layout import Layout
from actors.training.objectives import contrastive
from actors.training.objectives.contrastive import ContrastiveObjective
from actors.training.order import Order
from actors.training.steps import StepPlan
from app.bench.gang import Gang
from cluster.errors import ConfigError
from tests.actors.training.equivalence import Trace, assert_equal, follow
from tests.actors.training.pairs import packed, texts, write_embedder
from tests.actors.training.small import HERE, settings

STEPS = 4
BATCH = 8
WORDS = texts(60, seed=5)
TRIPLES = [WORDS[place : place + 3] for place in range(0, 60, 3)]


def contrasted(workers: int = 1, micro: int | None = None, kind: str = "none", **more: Any) -> TrainConfig:
    """4 fp32 steps of 8 pairs; by default each worker's share is one micro-batch."""
    objective = {"kind": "contrastive", "temperature": 0.1, **more.pop("objective", {})}
    return settings(
        objective=objective,
        adapter={"kind": kind, "r": 4, "alpha": 8, **more.pop("adapter", {})},
        parallel={"workers": {"min": workers, "max": workers}, "strategy": more.pop("strategy", "ddp")},
        optimizer={
            "learning_rate": 1e-3,
            "global_batch_size": BATCH,
            "micro_batch_size": micro or BATCH // workers,
            "max_grad_norm": 0.5,
        },
        steps=STEPS,
        **more,
    )


@pytest.fixture(scope="module")
def rows() -> pa.Table:
    """20 rows; some have one negative, some two, and two queries are asked twice."""
    uneven = [row if number % 3 else [*row, WORDS[number]] for number, row in enumerate(TRIPLES)]
    uneven[5][0], uneven[6][1] = uneven[4][0], uneven[2][1]
    return packed(uneven)


def decided(trace: Trace) -> Trace:
    """Without the biases of keys: they change no attention, so their gradient is rounding, which AdamW blows up."""
    return replace(trace, weights={name: one for name, one in trace.weights.items() if "key.bias" not in name})


def run(config: TrainConfig, folder: Path, rows: pa.Table) -> Trace:
    return decided(follow(HERE, config, folder, rows)[0])


def test_it_is_the_run_that_sentence_transformers_makes(tiny_embedder: Path) -> None:
    config = contrasted()
    found, _ = follow(HERE, config, tiny_embedder, packed(TRIPLES))
    model = embedder.load(tiny_embedder)
    model[0].model.pooler = None
    learning = [each for each in model.parameters() if each.requires_grad]
    adamw = torch.optim.AdamW(learning, lr=0.0, weight_decay=0.0)
    loss = losses.MultipleNegativesRankingLoss(model, scale=10.0)
    plan = StepPlan(len(TRIPLES), STEPS, BATCH, BATCH, 1)
    order = Order.of(plan, seed=0, shuffle=True)
    for step in range(STEPS):
        chosen = [TRIPLES[row] for row in order.rows_at(plan.first(step), plan.first(step + 1))]
        value = loss([model.tokenize(list(column)) for column in zip(*chosen, strict=True)], None)
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(learning, config.optimizer.max_grad_norm)
        optimizer.set_learning_rate(adamw, optimizer.learning_rate(config.optimizer, step, STEPS))
        adamw.step()
        adamw.zero_grad()
        assert found.losses[step] == pytest.approx(value.item(), rel=1e-5)
        assert found.norms[step] == pytest.approx(float(norm), rel=1e-4)
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    wanted = Trace(found.losses, found.norms, weights)
    assert_equal(decided(found), decided(wanted))


@pytest.fixture(scope="module")
def alone(tiny_embedder: Path, rows: pa.Table) -> dict[str, Trace]:
    """One process with the whole batch in one forward, by what learns."""
    return {kind: run(contrasted(kind=kind), tiny_embedder, rows) for kind in ("lora", "none")}


@pytest.mark.parametrize("kind", ["lora", "none"])
@pytest.mark.parametrize("micro", [1, 4])
def test_a_cached_step_is_one_that_keeps_its_graph(
    tiny_embedder: Path, rows: pa.Table, alone: dict[str, Trace], micro: int, kind: str
) -> None:
    assert_equal(run(contrasted(micro=micro, kind=kind), tiny_embedder, rows), alone[kind])


@pytest.mark.parametrize(
    ("strategy", "micro", "kind"), [("ddp", 4, "none"), ("ddp", 2, "lora"), ("fsdp", 4, "lora"), ("fsdp", 2, "none")]
)
def test_two_ranks_learn_what_one_process_learns(
    gang: Gang, tiny_embedder: Path, rows: pa.Table, alone: dict[str, Trace], strategy: str, micro: int, kind: str
) -> None:
    config = contrasted(2, micro, kind, strategy=strategy)
    for found, _ in gang.run(2, follow, config, tiny_embedder, rows):
        assert_equal(decided(found), alone[kind])


@pytest.mark.parametrize(
    "objective",
    [{"matryoshka": {"dims": [32, 8], "weights": [1.0, 2.0]}}, {"loss": "triplet", "temperature": None}],
    ids=["matryoshka", "triplet"],
)
def test_every_loss_is_that_of_the_whole_batch(
    gang: Gang, tiny_embedder: Path, rows: pa.Table, objective: dict[str, Any]
) -> None:
    wanted = run(contrasted(objective=objective), tiny_embedder, rows)
    for found, _ in gang.run(2, follow, contrasted(2, 2, objective=objective), tiny_embedder, rows):
        assert_equal(decided(found), wanted)


def test_a_cached_step_learns_from_the_dropout_that_its_vectors_had(tmp_path: Path, rows: pa.Table) -> None:
    """Its gradient is that of a graph over both micro-batches, drawn with the same random numbers."""
    folder, config = write_embedder(tmp_path / "dropping", dropout=0.3), contrasted(micro=4)
    micro = [MicroBatch.from_arrow(rows.slice(begin, 4)) for begin in (0, 4)]
    model = embedder.trainable(config, folder, "tiny").train()
    objective = ContrastiveObjective(model, "fp32")
    torch.manual_seed(9)
    vectors = torch.cat([objective(batch.input_ids, batch.labels, batch.position_ids) for batch in micro])
    together = MicroBatch.from_arrow(rows.slice(0, 8))
    given = contrastive.unpacked(together.input_ids, together.labels, together.position_ids)
    queries, documents = contrastive.arranged(vectors, given, width=int(given.places.max()))
    assert isinstance(config.objective, ContrastiveConfig)
    loss = contrastive.summed_loss(config.objective, queries, documents)
    (loss / 8).backward()
    norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
    engine = build(config, folder, "tiny", HERE, Layout.of(config.parallel, 1))
    torch.manual_seed(9)
    found = engine.step(micro, loss_tokens=8, learning_rate=1e-3)
    assert found.loss_sum == pytest.approx(loss.item(), rel=1e-5)
    assert found.grad_norm == pytest.approx(norm.item(), rel=1e-5)


def test_a_length_that_the_vectors_do_not_have_is_refused(tiny_embedder: Path) -> None:
    config = contrasted(objective={"matryoshka": {"dims": [64]}})
    with pytest.raises(ConfigError, match="names 64; vectors of tiny have 32"):
        build(config, tiny_embedder, "tiny", Place(0, 1, torch.device("cpu")), Layout.of(config.parallel, 1))


def test_the_folder_it_loads_is_a_sentence_transformers_one(tiny_embedder: Path) -> None:
    assert isinstance(embedder.load(tiny_embedder), SentenceTransformer)
