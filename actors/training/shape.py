"""What memory and time depend on: the shape of a model, read from its config and the headers of its weights.

Reads without torch and without loading a weight.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors import safe_open

_NOT_ADAPTED = ("embed", "lm_head", "norm")


@dataclass(frozen=True)
class Shape:
    """A decoder. `matrices` are the (out, in) shapes of the linear layers that LoRA may adapt, by layer name.

    `parameters` counts what is stored, so a tied head once.
    """

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    matrices: tuple[tuple[str, int, int], ...]

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, the largest single tensor of a small model."""
        return self.vocabulary * self.hidden

    @property
    def layer(self) -> int:
        """Parameters of one decoder layer."""
        return (self.parameters - self.embedding * (1 if self.tied else 2) - self.hidden) // self.layers


def read(folder: Path) -> Shape:
    """The shape of a Hugging Face folder; `OSError`, `ValueError` or `KeyError` if it has none."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    parameters, matrices = 0, []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as weights:
            for name in weights.keys():  # noqa: SIM118 (safe_open cannot be iterated)
                size = weights.get_slice(name).get_shape()
                parameters += prod(size)
                if len(size) == 2 and not any(part in name for part in _NOT_ADAPTED):
                    matrices.append((name.removesuffix(".weight"), size[0], size[1]))
    heads = config["num_attention_heads"]
    return Shape(
        parameters=parameters,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        intermediate=config.get("intermediate_size") or 4 * config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        matrices=tuple(sorted(matrices)),
    )
