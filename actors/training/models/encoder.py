"""Encoders inside a sentence-transformers model (BERT and its kin), spread over a mesh of rows. `parallelize` is the
recipe; its order is that of `dense`."""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from actors.training.config import TrainConfig
from actors.training.layout import Layout
from actors.training.models import dense
from cluster.errors import ConfigError


def parallelize(
    objective: torch.nn.Module, config: TrainConfig, layout: Layout, device: torch.device, mesh: DeviceMesh | None
) -> torch.nn.Module:
    """`objective` (whose `model` is a `SentenceTransformer`), spread over `mesh`; a mesh of None is one process."""
    embedder: Any = objective.model
    transformer = embedder[0].model
    if config.activation_checkpointing:
        dense.checkpoint_activations(transformer)
    if mesh is not None and layout.data > 1:
        return dense.spread_over_tokens(objective, layers(transformer), config, layout, device, mesh)
    return objective.to(device)


def layers(transformer: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of an encoder: the members of its largest list of modules, which no family calls the same."""
    lists = [part for part in transformer.modules() if isinstance(part, torch.nn.ModuleList) and len(part)]
    if not lists:
        raise ConfigError(
            f"{type(transformer).__name__} has no list of layers, which training could spread.",
            hint="Use strategy ddp, or a base in the shape of BERT.",
        )
    return list(max(lists, key=_parameters))


def _parameters(module: torch.nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())
