"""What training cannot do is said before anything is started: the reason, with its numbers, and the way out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file

from actors.training import support
from actors.training.config import TrainConfig
from actors.training.shape import Shape, reshaped_logits, special_attention
from cluster.errors import ConfigError
from tests.actors.training.small import VOCABULARY
from tests.actors.training.test_training_memory import SMOLLM2_135M

LLAMA = replace(SMOLLM2_135M, heads=8, kv_heads=4)
MIXTURE = replace(LLAMA, family="qwen3_moe", experts=8, experts_per_token=2, intermediate=64)
ATTENTION = ["q_proj", "v_proj"]


def config(workers: int = 2, adapter: dict[str, Any] | None = None, **parallel: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "adapter": adapter or {"kind": "none"},
            "parallel": {"workers": {"min": workers, "max": workers}, **parallel},
            "optimizer": {"global_batch_size": 48},
        }
    )


@pytest.mark.parametrize(
    ("shape", "settings", "said"),
    [
        (LLAMA, config(8, tensor=8), "tensor 8 does not divide the model's num_key_value_heads 4"),
        (replace(LLAMA, intermediate=7), config(tensor=2), "intermediate_size 7"),
        (replace(LLAMA, family="phi3"), config(tensor=2), "tensor 2: phi3 models have not been shown"),
        (MIXTURE, config(tensor=2), "tensor 2 does not cut the experts of qwen3_moe"),
        (replace(LLAMA, layers=3), config(4, pipeline=4), "3 layers cannot be cut into 4 stages"),
        (replace(LLAMA, layers=3), config(pipeline=2, schedule="interleaved"), "3 layers cannot be cut into 4 stages"),
        (replace(LLAMA, family="granite"), config(pipeline=2), "pipeline 2: granite models have not been shown"),
        (replace(LLAMA, family="qwen2", special=("layer_types",)), config(pipeline=2), "mixes kinds of layers"),
        (replace(LLAMA, special=("sliding_window",)), config(context=2), "does not do .sliding_window."),
        (LLAMA, config(16, context=8, tensor=2), "context 8 is more than the 4 attention heads"),
        (LLAMA, config(expert=2), "expert 2: llama models have no experts"),
        (MIXTURE, config(3, expert=3, strategy="fsdp"), "8 experts of this qwen3_moe model cannot be shared by 3"),
        (replace(MIXTURE, hidden=575), config(4, expert=2, strategy="ddp"), "575 × 128 cannot be cut for the 2 ranks"),
        (MIXTURE, config(expert=2, adapter={"kind": "lora"}), "adapter on fused experts"),
        (MIXTURE, config(expert=2, adapter={"target_modules": ["q_proj", "up_proj"]}), "adapter on fused experts"),
        (LLAMA, config(adapter={"target_modules": ["q_proj", "lm_head", "wq"]}), "names 'lm_head', 'wq', of which"),
        (LLAMA, config(adapter={"target_modules": ["self_attn.q_proj"]}), "names 'self_attn.q_proj', of which"),
        (MIXTURE, config(adapter={"kind": "lora", "dropout": 0.1}), "dropout 0.1"),
        (replace(LLAMA, plain=False, family="gpt2"), config(1), "gpt2 models are not made of layers with self_attn"),
        (replace(LLAMA, reshaped=("logit_scale",)), config(1), "reshape their logits .logit_scale."),
        (replace(LLAMA, parameters=0), config(1), "no weights"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(shape: Shape, settings: TrainConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        support.require(settings, shape)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        (LLAMA, config(8, tensor=4, pipeline=2)),
        (LLAMA, config(4, tensor=2, context=2)),
        (replace(LLAMA, special=("sliding_window",), family="mistral"), config(pipeline=2)),
        (MIXTURE, config(4, expert=2, context=2, strategy="fsdp")),
        (MIXTURE, config(expert=2, adapter={"target_modules": ATTENTION})),
        (MIXTURE, config(adapter={"kind": "lora"}, strategy="zero3")),
        (replace(LLAMA, family="granite"), config(strategy="fsdp")),
    ],
)
def test_what_can_be_is_not(shape: Shape, settings: TrainConfig) -> None:
    support.require(settings, shape)


SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def saved(config: Any, folder: Path) -> tuple[Shape, Any]:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return support.shape_of(folder), model


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma", "Qwen2", "Qwen3", "Qwen3Moe", "Mixtral"])
def test_a_shape_is_that_of_the_model_transformers_makes(family: str, tmp_path: Path) -> None:
    made = getattr(transformers, f"{family}Config")(**SIZES)
    shape, model = saved(made, tmp_path)
    assert shape.parameters == sum(part.numel() for part in model.parameters())
    assert shape.plain
    assert shape.family == made.model_type
    assert shape.special == special_attention(made.to_dict())
    assert bool(shape.special) is (family == "Mistral")  # whose window is 4096 unless it is told otherwise
    experts = sum(part.numel() for name, part in model.named_parameters() if ".experts." in name)
    assert shape.layers * shape.layer_experts == experts
    assert bool(experts) is (family in ("Qwen3Moe", "Mixtral"))


def test_other_models_are_known_for_what_they_are(tmp_path: Path) -> None:
    gpt2 = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=VOCABULARY)
    with pytest.raises(ConfigError, match="gpt2"):
        saved(gpt2, tmp_path / "gpt2")
    assert not saved(transformers.OPTConfig(**SIZES, word_embed_proj_dim=16), tmp_path / "opt")[0].plain
    mixed = transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert saved(mixed, tmp_path / "qwen2")[0].special == ("sliding_window", "layer_types")
    # As the hub has it: the window is named, and not used; and layers are not listed.
    assert special_attention({"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 21}) == ()
    assert special_attention({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}) == (
        "sliding_window",
        "layer_types",
    )
    assert special_attention({"rope_scaling": {"type": "dynamic"}}) == ("rope_type",)
    assert reshaped_logits({"logit_scale": 0.0625, "final_logit_softcapping": None}) == ("logit_scale",)


def test_files_that_are_no_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": "two"}))
    save_file({"w": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"shape of .* \(llama\) cannot be read"):
        support.shape_of(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ConfigError, match="SafetensorError"):
        support.shape_of(tmp_path)
