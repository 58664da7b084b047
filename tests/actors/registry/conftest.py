"""Small real artifacts and a log of facts, shared by the registry's tests."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis.configuration import set_hypothesis_home_dir
from safetensors.numpy import save_file

# Beside the other tools' caches; by default it is made in the working directory.
set_hypothesis_home_dir(Path(__file__).parents[3] / ".venv" / ".cache" / "hypothesis")


@pytest.fixture
def make_adapter(tmp_path: Path) -> Callable[..., Path]:
    """Writes a PEFT LoRA folder whose content depends on `seed`."""

    def make(folder: str = "adapter", *, seed: int = 0, rank: int = 4, recorded_rank: int | None = None) -> Path:
        path = tmp_path / folder
        path.mkdir()
        config = {
            "peft_type": "LORA",
            "base_model_name_or_path": "smollm2-135m-instruct",
            "r": recorded_rank or rank,
            "lora_alpha": 2 * rank,
            "target_modules": ["v_proj", "q_proj"],
        }
        (path / "adapter_config.json").write_text(json.dumps(config))
        random = np.random.default_rng(seed)
        stem = "base_model.model.model.layers.0.self_attn.q_proj"
        save_file(
            {
                f"{stem}.lora_A.weight": random.standard_normal((rank, 8), dtype=np.float32),
                f"{stem}.lora_B.weight": random.standard_normal((8, rank), dtype=np.float32),
            },
            path / "adapter_model.safetensors",
        )
        return path

    return make
