"""Each family that `support` lists for an axis learns on it what one process learns, with what makes it a family."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import transformers

from actors.training import support
from actors.training.config import TrainConfig
from app.bench.gang import Gang
from cluster.errors import ConfigError
from tests.actors.training.equivalence import Trace, assert_equal, follow, mesh_settings
from tests.actors.training.small import HERE, VOCABULARY

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
    "rope_theta": 10000.0,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3, tie_word_embeddings=True
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=4),
    "gemma": lambda: transformers.GemmaConfig(**SIZES, head_dim=8),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=8),
    "smollm3": lambda: transformers.SmolLM3Config(**SIZES, no_rope_layer_interval=2),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=32),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, **EXPERTS),
    "olmoe": lambda: transformers.OlmoeConfig(**SIZES, **EXPERTS),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
}


def settings(workers: int = 1, kind: str = "none", dropout: float = 0.0, **axes: Any) -> TrainConfig:
    return mesh_settings(
        adapter={"kind": kind, "r": 4, "alpha": 8, "dropout": dropout},
        parallel={"workers": {"min": workers, "max": workers}, **axes},
        optimizer={"learning_rate": 5e-3, "global_batch_size": 8, "micro_batch_size": 4, "max_grad_norm": 0.25},
        steps=3,
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The model folder of a family; biases and norms are drawn too, so that leaving one out shows."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
            with torch.no_grad():
                for part in model.parameters():
                    if part.ndim == 1:
                        part.add_(0.1 * torch.randn_like(part))
            made[family] = tmp_path_factory.mktemp(family)
            model.save_pretrained(made[family])
        return made[family]

    return folder


@pytest.fixture(scope="module")
def alone(base: Callable[[str], Path], rows: pa.Table) -> Callable[..., Trace]:
    """One process."""
    made: dict[str, Trace] = {}

    def trace(family: str, **changes: Any) -> Trace:
        key = f"{family} {changes}"
        if key not in made:
            made[key] = follow(HERE, settings(**changes), base(family), rows)[0]
        return made[key]

    return trace


@pytest.mark.parametrize(
    ("axis", "family"),
    [
        (axis, family)
        for axis, families in support.FAMILIES.items()
        for family in families
        if (axis, family) not in {("context", "mistral"), ("expert", "qwen3_moe")}  # a window; another file's
    ],
)
def test_a_family_learns_on_an_axis_what_one_process_learns(
    gang: Gang, axis: str, family: str, base: Callable[[str], Path], rows: pa.Table, alone: Callable[..., Trace]
) -> None:
    config = settings(2, **{axis: 2})
    support.require(config, support.shape_of(base(family)))
    (found, _), *_ = gang.run(2, follow, config, base(family), rows)
    wanted = alone(family)
    if axis == "pipeline":  # each rank has some of the weights
        found = Trace(found.losses, found.norms, {})
        wanted = Trace(wanted.losses, wanted.norms, {})
    assert_equal(found, wanted)


def test_dropout_under_tensor_ranks_is_that_of_one_process(
    gang: Gang, base: Callable[[str], Path], rows: pa.Table, alone: Callable[..., Trace]
) -> None:
    (found, _), *_ = gang.run(2, follow, settings(2, "lora", 0.3, tensor=2), base("llama"), rows)
    wanted = alone("llama", kind="lora", dropout=0.3)
    assert_equal(found, wanted)
    assert wanted.losses[1] != alone("llama", kind="lora").losses[1]


def refusal(*args: Any) -> str:
    try:
        follow(*args)
    except ConfigError as error:
        return error.message
    return ""


def test_a_norm_over_all_heads_is_not_cut(gang: Gang, base: Callable[[str], Path], rows: pa.Table) -> None:
    """It was, and each rank's norm was that of its own heads."""
    for said in gang.run(2, refusal, settings(2, tensor=2), base("olmo2"), rows):
        assert said == (
            "self_attn.q_norm of this model is a norm of all heads at once, which ranks with some heads cannot compute."
        )
