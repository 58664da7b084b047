"""The plan's formulas against figures worked by hand; `flywheel bench memory` sets them beside measured ones."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from actors.training.config import TrainConfig
from actors.training.flops import per_token
from actors.training.memory import estimate, trained
from actors.training.shape import Shape, read

SMOLLM2_135M = Shape(
    parameters=134_515_008,
    layers=30,
    hidden=576,
    intermediate=1536,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocabulary=49152,
    tied=True,
    matrices=tuple(
        sorted(
            (f"model.layers.{layer}.{name}", *size)
            for layer in range(30)
            for name, size in {
                "self_attn.q_proj": (576, 576),
                "self_attn.k_proj": (192, 576),
                "self_attn.v_proj": (192, 576),
                "self_attn.o_proj": (576, 576),
                "mlp.gate_proj": (1536, 576),
                "mlp.up_proj": (1536, 576),
                "mlp.down_proj": (576, 1536),
            }.items()
        )
    ),
)
PSI = SMOLLM2_135M.parameters


def config(strategy: str = "ddp", workers: int = 2, **changes: Any) -> TrainConfig:
    plain = {
        "adapter": {"kind": "none"},
        "precision": "fp32",
        "parallel": {"strategy": strategy, "workers": {"min": workers, "max": workers}},
        "optimizer": {"global_batch_size": workers},
    }
    return TrainConfig.model_validate({**plain, **changes})


def stays(settings: TrainConfig) -> float:
    """Bytes per parameter that are there at the end of a backward."""
    need = estimate(settings, SMOLLM2_135M, length=8)
    return (need.weights + need.gradients + need.optimizer) / PSI


@pytest.mark.parametrize(
    ("strategy", "workers", "bytes_each"),
    [
        ("ddp", 1, 16),
        ("ddp", 2, 16),
        ("fsdp", 2, 8),
        ("fsdp", 4, 4),
        # DeepSpeed keeps a master copy also in fp32: 4 + (4 + 4 + 8) / 2, all of it halved at stage 3, and a bucket.
        ("zero1", 2, 12),
        ("zero2", 2, 12),
        ("zero3", 2, 10 + 4 * 5e6 / PSI),
    ],
)
def test_what_stays_is_what_the_zero_paper_counts(strategy: str, workers: int, bytes_each: float) -> None:
    assert stays(config(strategy, workers)) == pytest.approx(bytes_each)


def test_bf16_halves_what_zero_multiplies_but_not_what_learns() -> None:
    assert stays(config("zero2", precision="bf16")) == pytest.approx(2 + (4 + 4 + 8) / 2)
    assert stays(config("zero1", precision="bf16")) == pytest.approx(2 + (4 + 8) / 2 + 4 + 2)
    assert stays(config("ddp", precision="bf16")) == pytest.approx(16)


def test_lora_learns_r_times_in_plus_out_and_the_base_costs_its_weights() -> None:
    lora = config(adapter={"kind": "lora", "r": 16}, precision="bf16")
    learning = 30 * 16 * (2 * (576 + 576) + 2 * (192 + 576) + 3 * (1536 + 576))
    assert trained(lora, SMOLLM2_135M) == learning == 4_884_480
    need = estimate(lora, SMOLLM2_135M, length=512)
    assert need.weights == pytest.approx(2 * PSI + 4 * learning)
    assert need.optimizer == 8 * learning
    some = config(adapter={"kind": "lora", "r": 16, "target_modules": ("q_proj", "v_proj")})
    assert trained(some, SMOLLM2_135M) == 30 * 16 * ((576 + 576) + (192 + 576))


def test_the_models_axes_share_layers_and_sequences() -> None:
    whole = estimate(config("ddp", 1), SMOLLM2_135M, length=2048)
    halved = estimate(
        config(parallel={"strategy": "ddp", "workers": {"min": 2, "max": 2}, "context": 2}), SMOLLM2_135M, length=2048
    )
    assert halved.activations == pytest.approx(whole.activations / 2)
    cut = estimate(
        config(parallel={"strategy": "ddp", "workers": {"min": 2, "max": 2}, "tensor": 2}), SMOLLM2_135M, length=2048
    )
    embedding = 4 * SMOLLM2_135M.embedding
    assert cut.weights == pytest.approx((4 * PSI - embedding) / 2 + embedding)


def test_checkpointed_activations_are_one_layer_and_every_layers_input() -> None:
    kept, again = (
        estimate(config("ddp", 1, activation_checkpointing=on), SMOLLM2_135M, length=4096).activations
        for on in (False, True)
    )
    inputs = 4096 * 576 * 4 * 30
    assert again == pytest.approx(kept / 30 + inputs)


def test_operations_are_six_per_parameter_and_four_beside_a_frozen_one() -> None:
    full = per_token(config(), SMOLLM2_135M, length=0)
    assert full == pytest.approx(6 * PSI, rel=1e-3)
    lora = config(adapter={"kind": "lora", "r": 16})
    assert per_token(lora, SMOLLM2_135M, length=0) == pytest.approx(4 * PSI + 6 * 4_884_480, rel=1e-3)
    again = config(activation_checkpointing=True)
    assert per_token(again, SMOLLM2_135M, length=0) == pytest.approx(8 * PSI, rel=1e-3)


def test_a_shape_is_read_from_headers(tmp_path: Path) -> None:
    sizes = {"model.embed_tokens": (10, 4), "model.layers.0.mlp.up_proj": (6, 4), "model.norm": (4,)}
    save_file(
        {f"{name}.weight": np.zeros(size, np.float32) for name, size in sizes.items()}, tmp_path / "model.safetensors"
    )
    facts = {"num_hidden_layers": 1, "hidden_size": 4, "num_attention_heads": 2, "vocab_size": 10}
    (tmp_path / "config.json").write_text(json.dumps({**facts, "model_type": "llama", "tie_word_embeddings": True}))
    shape = read(tmp_path)
    assert shape.parameters == 40 + 24 + 4
    assert shape.matrices == (("model.layers.0.mlp.up_proj", 6, 4),)
    assert (shape.layer, shape.embedding, shape.head_dim, shape.tied) == (24, 40, 2, True)
