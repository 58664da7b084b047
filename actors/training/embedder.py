"""The embedder that learns: a sentence-transformers folder with what learns in fp32, and its way back into a folder.

The modules of the folder (pooling, dense layers, normalisation) stay what they are; an adapter sits on its transformer.
Knows sentence-transformers and PEFT. Does not know how the model is spread over workers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from sentence_transformers import SentenceTransformer
from transformers.utils import logging as transformers_logging

from actors.training import adapter
from actors.training.config import TrainConfig
from cluster.errors import ConfigError, TrainingError

_UNUSED = "pooler."
"""A head of BERT and its kin that no pooling of ours reads: it has no gradient, for which DDP would wait."""


def load(folder: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """The `SentenceTransformer` in `folder`, on the CPU; `ConfigError` if it cannot be loaded."""
    transformers_logging.disable_progress_bar()  # a worker's log is no place for it
    try:
        return SentenceTransformer(str(folder), device="cpu", local_files_only=True, model_kwargs={"dtype": dtype})
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{folder} cannot be loaded as a sentence-transformers model: {str(error).splitlines()[0]}",
            hint="Give a folder with modules.json, or one of the catalog's embedders.",
        ) from None


def trainable(config: TrainConfig, path: Path, name: str) -> Any:
    """The embedder in the folder `path` with what learns in fp32: its adapter, or with adapter.kind none all."""
    adapted = config.adapter.kind == "lora"
    model = load(path, dtype=torch.bfloat16 if adapted and config.precision == "bf16" else torch.float32)
    transformer = model[0].model
    if getattr(transformer, "pooler", None) is not None:
        transformer.pooler = None
    if adapted:
        model.requires_grad_(False)
        # What follows the transformer is small, and is computed outside autocast.
        for module in list(model)[1:]:
            module.float()
        model[0].model = adapter.attach(
            transformer, config.adapter, base_name=name, seed=config.seed, task="FEATURE_EXTRACTION"
        )
    return model


def learner(model: Any) -> Any:
    """The part of `model` whose parameters learn, under the names that its files have: PEFT's model, or all."""
    transformer = model[0].model
    return transformer if isinstance(transformer, PeftModel) else model


def with_weights(base: Path, weights: Mapping[str, torch.Tensor]) -> Any:
    """The embedder in `base` with `weights` in place of its own; `TrainingError` if they are another model's."""
    model = load(base)
    expected = dict(model.named_parameters())
    left = {name for name in expected.keys() - weights.keys() if _UNUSED not in name}
    strange = sorted(left | (weights.keys() - expected.keys()))
    if strange:
        raise TrainingError(
            f"The checkpoint does not fit {base}: {', '.join(strange[:3])}.",
            hint="The base may have been replaced since the run.",
        )
    with torch.no_grad():
        for name, values in weights.items():
            expected[name].copy_(values)
    return model


def merged(base: Path, folder: Path) -> Any:
    """The embedder in `base` with the adapter in `folder` added to its weights, in fp32."""
    model = load(base)
    transformer = model[0].model
    head = getattr(transformer, "pooler", None)
    if head is not None:
        transformer.pooler = None  # had no adapter in training, and would be given an empty one here
    model[0].model = PeftModel.from_pretrained(transformer, folder).merge_and_unload()
    if head is not None:
        model[0].model.pooler = head
    return model


def save(model: Any, target: Path, *, dtype: torch.dtype) -> None:
    """Write `model` into the folder `target` as sentence-transformers loads it, weights in safetensors."""
    model.to(dtype).save_pretrained(str(target), create_model_card=False, safe_serialization=True)
