"""Whatever the mesh, the same seed and the same rows give the same run: losses, gradient norms, weights."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.training.config import TrainConfig
from actors.training.engine import Engine
from app.bench.gang import Gang
from cluster.errors import ConfigError
from tests.actors.training.equivalence import Trace, assert_equal, follow, mesh_settings
from tests.actors.training.small import HERE, VOCABULARY

TOP = {"activation_checkpointing", "compile", "optimizer", "precision", "steps"}


def spread(workers: int, kind: str, **settings: Any) -> TrainConfig:
    """`settings` are of `parallel`, unless they are known at the top."""
    top = {name: settings.pop(name) for name in TOP & settings.keys()}
    return mesh_settings(
        adapter={"kind": kind, "r": 4, "alpha": 8},
        parallel={"workers": {"min": workers, "max": workers}, **settings},
        **top,
    )


@pytest.fixture(scope="module")
def alone(tiny_base: Path, rows: pa.Table) -> dict[str, Trace]:
    """One process, by what learns."""
    return {kind: follow(HERE, spread(1, kind), tiny_base, rows)[0] for kind in ("lora", "none")}


def layouts(engine: Engine) -> dict[str, tuple[Any, ...]]:
    """Where each tensor of the state lies: whole shape, axes of its mesh, placements."""
    return {
        name: (tuple(each.shape), each.device_mesh.mesh_dim_names, str(each.placements))
        if isinstance(each, DTensor)
        else (tuple(each.shape), None, "")
        for name, each in engine.state().items()
    }


@pytest.mark.parametrize("kind", ["lora", "none"])
@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        (2, {"strategy": "ddp"}),
        (2, {"strategy": "fsdp"}),
        (2, {"tensor": 2}),
        (4, {"strategy": "hsdp", "replicate": 2}),
        (4, {"strategy": "fsdp", "tensor": 2}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_a_mesh_learns_what_one_process_learns(
    gang: Gang,
    workers: int,
    settings: dict[str, Any],
    kind: str,
    tiny_base: Path,
    rows: pa.Table,
    alone: dict[str, Trace],
) -> None:
    for found, _ in gang.run(workers, follow, spread(workers, kind, **settings), tiny_base, rows):
        assert_equal(found, alone[kind])


def test_replicas_of_cut_matrices_learn_it_too(
    gang: Gang, tiny_base: Path, rows: pa.Table, alone: dict[str, Trace]
) -> None:
    (found, lies), *_ = gang.run(4, follow, spread(4, "lora", tensor=2), tiny_base, rows, layouts)
    assert_equal(found, alone["lora"])
    pair = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    for part in ("weights", "exp_avg", "exp_avg_sq"):
        # Beside columns, B is cut as they are and A is whole on both tensor ranks. Shapes are those of the whole.
        assert lies[f"{part}/{pair.format('A')}"][:2] == ((4, 32), ("replicate", "shard"))
        assert lies[f"{part}/{pair.format('B')}"][:2] == ((32, 4), ("replicate", "shard", "tensor"))


def test_accumulation_is_one_large_batch(tiny_base: Path, rows: pa.Table, alone: dict[str, Trace]) -> None:
    for kind in ("lora", "none"):
        for micro in (1, 8):
            batch = {"learning_rate": 5e-3, "global_batch_size": 8, "micro_batch_size": micro, "max_grad_norm": 0.25}
            assert_equal(follow(HERE, spread(1, kind, optimizer=batch), tiny_base, rows)[0], alone[kind])


def test_activation_checkpointing_changes_nothing(
    gang: Gang, tiny_base: Path, rows: pa.Table, alone: dict[str, Trace]
) -> None:
    settings = {"strategy": "fsdp", "activation_checkpointing": True}
    found, _ = gang.run(2, follow, spread(2, "none", **settings), tiny_base, rows)
    assert_equal(found[0], alone["none"])


def test_compiled_layers_change_nothing(tiny_base: Path, rows: pa.Table, alone: dict[str, Trace]) -> None:
    found, _ = follow(HERE, spread(1, "none", compile=True, activation_checkpointing=True), tiny_base, rows)
    assert_equal(found, alone["none"])


def dtypes(engine: Engine) -> set[torch.dtype]:
    return {tensor.dtype for tensor in engine.state().values()}


def test_in_bf16_what_learns_stays_in_fp32(
    gang: Gang, tiny_base: Path, rows: pa.Table, alone: dict[str, Trace]
) -> None:
    for kind in ("lora", "none"):
        config = spread(2, kind, steps=4, strategy="fsdp", precision="bf16")
        (found, kinds), _ = gang.run(2, follow, config, tiny_base, rows, dtypes)
        assert kinds == {torch.float32}
        one, _ = follow(HERE, spread(1, kind, steps=4, precision="bf16"), tiny_base, rows)
        assert found.losses == pytest.approx(one.losses, rel=1e-3)
        assert found.losses != one.losses
        assert one.losses[0] == pytest.approx(alone[kind].losses[0], rel=1e-2)


def test_norms_of_heads_see_the_heads_of_all_ranks(gang: Gang, rows: pa.Table, tmp_path: Path) -> None:
    """Qwen3's attention has biases, which are cut, and norms of heads, whose gradient is a sum over ranks."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, **sizes, **heads)).save_pretrained(tmp_path / "base")
    one, _ = follow(HERE, spread(1, "none", steps=5), tmp_path / "base", rows)
    found, _ = gang.run(2, follow, spread(2, "none", steps=5, tensor=2), tmp_path / "base", rows)
    assert any("q_norm" in name for name in one.weights)
    assert_equal(found[0], one)


def refusal(*args: Any) -> str:
    try:
        follow(*args)
    except ConfigError as error:
        return error.message
    return ""


def test_more_tensor_ranks_than_heads_are_refused_with_the_sizes(gang: Gang, tiny_base: Path, rows: pa.Table) -> None:
    for said in gang.run(4, refusal, spread(4, "lora", tensor=4), tiny_base, rows):
        assert said == "parallel.tensor 4 does not divide the model's num_key_value_heads 2."
