"""Adapters that cost nothing to make and cannot be overlooked: random weights, large enough to change every answer."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

MODULES = ("q_proj", "v_proj")


def write_adapter(
    folder: Path, base: Path, *, seed: int, rank: int = 8, scale: float = 0.3, width: int | None = None
) -> Path:
    """A PEFT folder for the model in `base`; equal seeds give equal bytes. A `width` unlike the base's: a misfit."""
    config = json.loads((base / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    outs = {"q_proj": config["num_attention_heads"] * head, "v_proj": config["num_key_value_heads"] * head}
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module in MODULES:
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            a = random.standard_normal((rank, width or config["hidden_size"])) / np.sqrt(config["hidden_size"])
            tensors[f"{prefix}.lora_A.weight"] = a.astype(np.float32)
            b = scale * random.standard_normal((outs[module], rank))
            tensors[f"{prefix}.lora_B.weight"] = b.astype(np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": rank,
        "lora_alpha": 2 * rank, "target_modules": list(MODULES), "bias": "none", "lora_dropout": 0.0,
        "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
