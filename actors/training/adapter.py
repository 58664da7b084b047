"""The LoRA adapter: attach it to a frozen base, take its weights out, write it in the form that PEFT and vLLM load.

Knows transformers and PEFT. Does not know how the model is spread over workers: it is given whole tensors.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from actors.training import attention
from actors.training.config import AdapterConfig, TrainConfig
from cluster.errors import ConfigError

WEIGHTS = "adapter_model.safetensors"


def load_base(path: Path, precision: str, device: torch.device) -> Any:
    """The base model in the folder `path`, weights in `precision`, ready to be trained on `device` (still on CPU)."""
    model = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
        use_safetensors=True,
        local_files_only=True,
    )
    model.set_attn_implementation(attention.implementation(model.config, device))
    return model


def trainable(config: TrainConfig, path: Path, name: str, device: torch.device) -> Any:
    """The base in the folder `path` with what learns in fp32: its adapter, or, with adapter.kind none, all of it."""
    if config.adapter.kind == "none":
        return load_base(path, "fp32", device)
    base = load_base(path, config.precision, device)
    return attach(base, config.adapter, base_name=name, seed=config.seed)


def learning(model: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters that learn, under the names that PEFT and Hugging Face give them in files."""
    return {canonical(name): part for name, part in model.named_parameters() if part.requires_grad}


def canonical(name: str) -> str:
    """A parameter's name without what PEFT, the compiler and wrappers of modules put into it."""
    for inserted in ("_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(inserted, "")
    return name.replace(".default.", ".") if ".lora_" in name else name


def attach(model: Any, config: AdapterConfig, *, base_name: str, seed: int, task: str = "CAUSAL_LM") -> Any:
    """`model` as a PEFT model with a fresh adapter in fp32; equal seeds give equal adapters.

    `task` is PEFT's name of what the base does.

    The adapter's weights stay in fp32 also beside a bf16 base: at the small learning rates of a schedule's end
    bf16 would round the updates away. Autocast runs its matrix products in bf16.
    """
    torch.manual_seed(seed)
    lora = LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules),
        task_type=task,
    )
    try:
        adapted = get_peft_model(model, lora)
    except ValueError as error:
        linear = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
        raise ConfigError(
            f"adapter.target_modules {config.target_modules!r} does not fit {base_name}: {str(error).splitlines()[0]}",
            hint=f"Use all-linear, or some of: {', '.join(sorted(linear))}.",
        ) from None
    settled = adapted.peft_config["default"]
    settled.base_model_name_or_path = base_name
    # PEFT holds the full names of all-linear's layers in a set: long, and in another order in every process.
    settled.target_modules = sorted({name.rpartition(".")[2] for name in settled.target_modules})
    # PEFT would turn the input of every adapted layer into the adapter's dtype (fp32), and autocast turn it back: two
    # copies that change nothing. Said once: PEFT's context manager for it walks over all modules, twice in each step.
    for module in adapted.modules():
        if isinstance(module, BaseTunerLayer):
            module.cast_input_dtype_enabled = False
    return adapted


def state(adapted: Any) -> dict[str, torch.Tensor]:
    """The adapter's weights under the names that PEFT and vLLM read (DTensors where the model is sharded)."""
    # By default PEFT asks the hub whether the base's vocabulary has changed. We never train embeddings.
    return dict(get_peft_model_state_dict(adapted, save_embedding_layers=False))


def config_text(adapted: Any) -> str:
    """PEFT's `adapter_config.json` of a model that has an adapter."""
    with tempfile.TemporaryDirectory() as folder:
        adapted.peft_config["default"].save_pretrained(folder)
        return Path(folder, "adapter_config.json").read_text(encoding="utf-8")


def save(adapted: Any, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write `weights` (whole tensors) and the adapter's config into `folder`, without any pickle."""
    folder.mkdir(parents=True)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(plain, folder / WEIGHTS, metadata={"format": "pt"})
    adapted.peft_config["default"].save_pretrained(str(folder))


def load(adapted: Any, folder: Path) -> None:
    """Put the weights in `folder` into `adapted`, which is not yet sharded."""
    set_peft_model_state_dict(adapted, load_file(folder / WEIGHTS))
