"""A pipeline of stages learns what one process learns, and its state is that of the whole model."""

import gc
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from actors.training import adapter, engine, objectives, optimizer
from actors.training.batching import NO_LOSS, MicroBatch
from actors.training.config import TrainConfig
from actors.training.engine import Place
from actors.training.layout import Layout, layer_ranges
from actors.training.models import stages
from actors.training.objectives import sft
from actors.training.steps import StepPlan
from app.bench.gang import Gang
from cluster.errors import ConfigError
from tests.actors.training.equivalence import STEPS, laid_out, mesh_settings, whole
from tests.actors.training.small import HERE, VOCABULARY, memory_feed, packed_rows

HALF = STEPS // 2


@dataclass(frozen=True)
class Part:
    """What one rank sees of some steps: its part of each loss, the norms, its part of the state, and what it holds."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, np.ndarray] = field(default_factory=dict)
    parameters: int = 0


def follow(
    place: Place,
    config: TrainConfig,
    base: Path,
    rows: pa.Table,
    start: int = 0,
    stop: int = STEPS,
    before: dict[str, np.ndarray] | None = None,
) -> Part:
    """Steps `start` to `stop` of a run, from the state `before`, as the loop makes them. Work for `Gang.run`."""
    layout = Layout.of(config.parallel, place.world_size)
    plan = StepPlan(rows.num_rows, config.steps, config.optimizer.global_batch_size, 1, layout.data)
    trained = engine.build(config, base, base.name, place, layout)
    if before:
        trained.load({name: laid_out(before[name], now) for name, now in trained.state().items()}, start)
    part = Part(parameters=sum(each.numel() for each in trained.model.parameters()))
    batches = memory_feed(rows, layout.data_rank(place.rank))(plan, start)
    for step in range(start, stop):
        micro = [next(batches) for _ in range(plan.accumulation)]
        counted = torch.tensor([sum(map(sft.count_loss_tokens, micro))])
        if place.world_size > 1:
            torch.distributed.all_reduce(counted)
            counted = counted // (layout.world_size // layout.data)
        rate = optimizer.learning_rate(config.optimizer, step, plan.steps)
        torch.manual_seed(step)
        result = trained.step(micro, loss_tokens=counted.item(), learning_rate=rate)
        part.losses.append(result.loss_sum / counted.item())
        part.norms.append(result.grad_norm)
    part.state.update({name: whole(tensor).numpy() for name, tensor in trained.state().items()})
    trained.close()
    return part


def together(parts: list[Part]) -> Part:
    """What the ranks saw, as one process would have seen it."""
    for part in parts[1:]:
        assert part.norms == parts[0].norms
    state: dict[str, np.ndarray] = {}
    for part in parts:
        for name, values in part.state.items():
            np.testing.assert_array_equal(values, state.setdefault(name, values), err_msg=name)
    losses = [sum(each) for each in zip(*(part.losses for part in parts), strict=True)]
    return Part(losses, parts[0].norms, state, sum(part.parameters for part in parts))


def assert_equal(found: Part, wanted: Part, *, start: int = 0) -> None:
    """Losses and norms within 1e-5, the same names, the weights as near as AdamW lets them be."""
    np.testing.assert_allclose(found.losses, wanted.losses[start:], rtol=1e-5)
    np.testing.assert_allclose(found.norms, wanted.norms[start:], rtol=1e-5)
    assert found.state.keys() == wanted.state.keys()
    for name, values in found.state.items():
        np.testing.assert_allclose(values, wanted.state[name], rtol=1e-3, atol=1e-4, err_msg=name)


def pipelined(workers: int, kind: str, **axes: Any) -> TrainConfig:
    return mesh_settings(
        adapter={"kind": kind, "r": 4, "alpha": 8},
        optimizer={"learning_rate": 5e-3, "global_batch_size": 4, "max_grad_norm": 0.25},
        parallel={"workers": {"min": workers, "max": workers}, "pipeline": 2 if workers > 1 else 1, **axes},
    )


@pytest.fixture(scope="module")
def deep_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as `tiny_base`, of 5 layers: no number of stages divides them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("deep-llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def some_rows() -> pa.Table:
    """13 rows, of which every fourth has nothing to learn from: a micro-batch is one row here."""
    table = packed_rows(13, length=24, seed=7)
    labels = table.column("labels").to_pylist()
    silent = [[NO_LOSS] * len(row) if number % 4 == 0 else row for number, row in enumerate(labels)]
    return table.set_column(table.schema.get_field_index("labels"), "labels", pa.array(silent, pa.list_(pa.int32())))


@pytest.fixture(scope="module")
def alone(deep_base: Path, some_rows: pa.Table) -> dict[str, Part]:
    """One process, by kind of adapter."""
    return {kind: follow(HERE, pipelined(1, kind), deep_base, some_rows) for kind in ("lora", "none")}


@pytest.mark.parametrize(
    ("workers", "kind", "axes"),
    [
        (2, "lora", {}),
        (2, "none", {}),
        (2, "lora", {"schedule": "interleaved"}),
        (2, "none", {"schedule": "interleaved"}),
        (4, "none", {"strategy": "ddp"}),
        (4, "lora", {"strategy": "fsdp"}),
        (4, "none", {"strategy": "fsdp", "schedule": "interleaved"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) or "1f1b" if isinstance(value, dict) else str(value),
)
def test_a_pipeline_learns_what_one_process_learns(
    gang: Gang, workers: int, kind: str, axes: dict[str, Any], deep_base: Path, some_rows: pa.Table, alone: Any
) -> None:
    found = together(gang.run(workers, follow, pipelined(workers, kind, **axes), deep_base, some_rows))
    assert_equal(found, alone[kind])


def test_a_stage_may_be_shared_by_tensor_ranks(
    gang: Gang, deep_base: Path, some_rows: pa.Table, alone: dict[str, Part]
) -> None:
    found = together(gang.run(4, follow, pipelined(4, "none", tensor=2), deep_base, some_rows, 0, 4))
    np.testing.assert_allclose(found.losses, alone["none"].losses[:4], rtol=1e-5)
    np.testing.assert_allclose(found.norms, alone["none"].norms[:4], rtol=1e-5)


def test_each_rank_holds_its_own_stage_alone(
    gang: Gang, deep_base: Path, some_rows: pa.Table, alone: dict[str, Part]
) -> None:
    parts = gang.run(2, follow, pipelined(2, "none"), deep_base, some_rows, 0, 1)
    layer = (alone["none"].parameters - VOCABULARY * 32 - 32) // 5
    # The embedding is on both: it is the last stage's head.
    assert [part.parameters for part in parts] == [3 * layer + VOCABULARY * 32, 2 * layer + 32 + VOCABULARY * 32]
    assert [part.losses[0] > 0 for part in parts] == [False, True]
    assert not parts[0].state.keys() & parts[1].state.keys()


def test_half_a_run_goes_on_on_another_mesh(
    gang: Gang, deep_base: Path, some_rows: pa.Table, alone: dict[str, Part]
) -> None:
    piped = pipelined(4, "none", strategy="fsdp")
    half = together(gang.run(4, follow, piped, deep_base, some_rows, 0, HALF))
    assert_equal(
        follow(HERE, pipelined(1, "none"), deep_base, some_rows, HALF, STEPS, half.state), alone["none"], start=HALF
    )
    again = gang.run(
        2, follow, pipelined(2, "none", schedule="interleaved"), deep_base, some_rows, HALF, STEPS, half.state
    )
    assert_equal(together(again), alone["none"], start=HALF)


def test_the_stages_one_after_the_other_are_the_model(deep_base: Path, some_rows: pa.Table) -> None:
    def model() -> Any:
        return adapter.load_base(deep_base, "fp32", HERE.device)

    batch = MicroBatch.from_arrow(some_rows.slice(1, 2))
    wanted = objectives.build(pipelined(1, "none"), model())(batch.input_ids, batch.labels, batch.position_ids)
    passed = batch.input_ids
    for number in range(4):
        mine = model()
        layers = [weakref.ref(layer) for layer in mine.get_decoder().layers]
        (stage,) = stages.cut(mine, [number], 4, sft.summed_loss, "fp32")
        gc.collect()
        assert [n for n, layer in enumerate(layers) if layer()] == list(layer_ranges(5, 4)[number])
        assert {name for name, _ in mine.named_parameters()} <= {name for name, _ in model().named_parameters()} | {
            "lm_head.weight"
        }
        passed = stage(passed, batch.position_ids, batch.labels)
    assert torch.equal(passed, wanted)


def test_a_model_that_is_no_plain_stack_is_not_cut() -> None:
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
    }
    mixed = Qwen2ForCausalLM(Qwen2Config(**shape, use_sliding_window=True, max_window_layers=2))
    with pytest.raises(ConfigError, match="mixes kinds of layers"):
        stages.cut(mixed, [0], 2, sft.summed_loss, "fp32")
    learned_positions = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=VOCABULARY))
    with pytest.raises(ConfigError, match="no plain stack of layers"):
        stages.cut(learned_positions, [0], 2, sft.summed_loss, "fp32")


def test_layers_are_shared_evenly_and_the_middle_takes_the_rest() -> None:
    assert [len(each) for each in layer_ranges(5, 2)] == [3, 2]
    assert [len(each) for each in layer_ranges(7, 3)] == [2, 3, 2]
    assert [len(each) for each in layer_ranges(5, 4)] == [1, 2, 1, 1]
    assert [number for each in layer_ranges(7, 4) for number in each] == list(range(7))
    with pytest.raises(ConfigError, match="2 layers cannot be cut into 4 stages"):
        layer_ranges(2, 4)


def test_interleaving_wants_rounds_of_whole_micro_batches() -> None:
    with pytest.raises(ValueError, match="interleaved takes the 5 micro-batches"):
        mesh_settings(
            parallel={"workers": {"min": 2, "max": 2}, "pipeline": 2, "schedule": "interleaved"},
            optimizer={"global_batch_size": 5, "micro_batch_size": 1},
        )
