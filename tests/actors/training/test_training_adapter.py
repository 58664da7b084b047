"""The adapter is the same for the same seed, and what is written is what PEFT and vLLM load."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open

from actors.training import adapter
from actors.training.batching import MicroBatch
from actors.training.config import AdapterConfig
from actors.training.objectives.sft import SftObjective
from cluster.errors import ConfigError

CPU = torch.device("cpu")


def attached(base: Path, precision: str = "fp32", seed: int = 0, **changes: object) -> object:
    config = AdapterConfig.model_validate({"r": 4, "alpha": 8, **changes})
    return adapter.attach(adapter.load_base(base, precision, CPU), config, base_name="tiny", seed=seed)


def test_only_the_adapter_learns_in_fp32_beside_a_bf16_base(tiny_base: Path) -> None:
    model = attached(tiny_base, "bf16")
    dtypes = {parameter.requires_grad: parameter.dtype for parameter in model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    assert all("lora_" in name for name, parameter in model.named_parameters() if parameter.requires_grad)


def test_equal_seeds_give_equal_adapters(tiny_base: Path) -> None:
    first, same, other = (adapter.state(attached(tiny_base, seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_what_enters_the_adapter_is_not_turned_into_fp32_and_back(tiny_base: Path, rows: pa.Table) -> None:
    model = attached(tiny_base, "bf16")
    entered: list[torch.dtype] = []
    for name, module in model.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_pre_hook(lambda _, given: entered.append(given[0].dtype))
    batch = MicroBatch.from_arrow(rows.slice(0, 2))
    SftObjective(model, "bf16")(batch.input_ids, batch.labels, batch.position_ids)
    assert len(entered) == 14
    assert set(entered) == {torch.bfloat16}


def test_a_saved_adapter_gives_the_same_loss_when_peft_loads_it(
    tiny_base: Path, rows: pa.Table, tmp_path: Path
) -> None:
    model = attached(tiny_base)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    adapter.save(model, adapter.state(model), tmp_path / "adapter")
    batch = MicroBatch.from_arrow(rows)
    loaded = PeftModel.from_pretrained(adapter.load_base(tiny_base, "fp32", CPU), tmp_path / "adapter")
    here, there, bare = (
        SftObjective(each, "fp32")(batch.input_ids, batch.labels, batch.position_ids).item()
        for each in (model, loaded, adapter.load_base(tiny_base, "fp32", CPU))
    )
    assert here == pytest.approx(there, rel=1e-6)
    assert abs(here - bare) > 1


def test_the_files_are_those_that_vllm_reads(tiny_base: Path, tmp_path: Path) -> None:
    model = attached(tiny_base)
    adapter.save(model, adapter.state(model), tmp_path / "adapter")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "tiny"
    assert written["r"] == 4
    assert written["modules_to_save"] is None
    assert written["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        assert all(key.endswith((".lora_A.weight", ".lora_B.weight")) for key in file.keys())  # noqa: SIM118


def test_modules_that_the_base_does_not_have_are_named_with_those_it_has(tiny_base: Path) -> None:
    with pytest.raises(ConfigError, match="query_key_value") as caught:
        attached(tiny_base, target_modules=("query_key_value",))
    assert "q_proj" in str(caught.value.hint)
