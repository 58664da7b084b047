"""How each family of models is spread over a mesh: one file a family, one ordered recipe in each."""

from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from actors.training import expert
from actors.training.config import TrainConfig
from actors.training.layout import Layout
from actors.training.models import dense, encoder, moe
from cluster.errors import ConfigError


class Recipe(Protocol):
    """`parallelize` of a family's module."""

    def __call__(
        self,
        objective: torch.nn.Module,
        config: TrainConfig,
        layout: Layout,
        device: torch.device,
        mesh: DeviceMesh | None,
        /,
    ) -> torch.nn.Module: ...


def recipe(model: Any, layout: Layout, kind: str = "sft") -> Recipe:
    """The recipe for `model` (transformers' or PEFT's), by what its layers are made of; `kind` is the objective's."""
    if kind == "contrastive":
        return encoder.parallelize
    if layout.expert > 1 or next(expert.modules(model), None):
        return moe.parallelize
    layers = getattr(model.get_decoder(), "layers", ())
    if layers and all(hasattr(layer, "self_attn") and hasattr(layer, "mlp") for layer in layers):
        return dense.parallelize
    raise ConfigError(
        f"{model.config.model_type} models are not made of layers with self_attn and mlp, which training can spread.",
        hint="Choose a base model in the shape of Llama (SmolLM2, Qwen, Mistral), or a mixture such as Qwen3-MoE.",
    )
