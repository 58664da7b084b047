"""What memory, time and the ways of being cut depend on: the shape of a model, read from its config and the headers
of its weights.

Reads without torch and without loading a weight.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import safe_open

_NOT_ADAPTED = ("embed", "lm_head", "norm")
_EXPERTS = ".experts."
_CAPPED = ("attn_logit_softcapping", "attention_chunk_size", "kv_lora_rank")
_OF_LENGTH = {"dynamic", "longrope"}
_RESHAPED = ("final_logit_softcapping", "logit_scale", "logits_scaling")


@dataclass(frozen=True)
class Shape:
    """A decoder. `matrices` are the (out, in) shapes of the linear layers that LoRA may adapt, by layer name.

    `parameters` counts what is stored, so a tied head once. `intermediate` is the width of an MLP, of one expert in a
    mixture. `special` and `reshaped` name the settings of `special_attention` and `reshaped_logits`; `plain` says that
    every layer has a `self_attn`, and a `mlp` or experts.
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
    family: str = "llama"
    experts: int = 0
    experts_per_token: int = 0
    special: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    plain: bool = True

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, the largest single tensor of a small model."""
        return self.vocabulary * self.hidden

    @property
    def layer(self) -> int:
        """Parameters of one decoder layer, all its experts included."""
        return (self.parameters - self.embedding * (1 if self.tied else 2) - self.hidden) // self.layers

    @property
    def layer_experts(self) -> int:
        """Parameters of the experts of one layer, each a gated MLP of three matrices."""
        return 3 * self.experts * self.hidden * self.intermediate


def special_attention(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings of a model's config by which it attends to less than, or otherwise than, all tokens before.

    A `rope_type` counts that turns by the longest position in a batch, which ranks with parts of rows do not know.
    """
    found = [name for name in _CAPPED if facts.get(name)]
    if facts.get("sliding_window") and facts.get("use_sliding_window", True):
        found.append("sliding_window")
    if set(facts.get("layer_types") or ()) - {"full_attention"} or (found and facts.get("max_window_layers")):
        found.append("layer_types")
    rope = facts.get("rope_parameters") or facts.get("rope_scaling") or {}
    if {rope.get("rope_type"), rope.get("type")} & _OF_LENGTH:
        found.append("rope_type")
    return tuple(found)


def reshaped_logits(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings of a model's config by which its logits are not what its head gives."""
    return tuple(name for name in _RESHAPED if facts.get(name) is not None)


def read(folder: Path) -> Shape:
    """The shape of a Hugging Face folder; `OSError`, `ValueError` or `KeyError` if it has none."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    parameters, in_experts, names, matrices = 0, 0, set(), []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as weights:
            for name in weights.keys():  # noqa: SIM118 (safe_open cannot be iterated)
                size = weights.get_slice(name).get_shape()
                parameters += prod(size)
                in_experts += prod(size) if _EXPERTS in name else 0
                names.add(name)
                if len(size) == 2 and not any(part in name for part in _NOT_ADAPTED):
                    matrices.append((name.removesuffix(".weight"), size[0], size[1]))
    heads = config["num_attention_heads"]
    experts = (config.get("num_experts") or config.get("num_local_experts") or 0) if in_experts else 0
    inner = config.get("intermediate_size") or 4 * config["hidden_size"]
    layers = config["num_hidden_layers"]
    return Shape(
        parameters=parameters,
        layers=layers,
        hidden=config["hidden_size"],
        # Families call the width of an expert by different settings; its weights are in one shape.
        intermediate=in_experts // (3 * experts * config["hidden_size"] * layers) if experts else inner,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        matrices=tuple(sorted(matrices)),
        family=config["model_type"],
        experts=experts,
        experts_per_token=config["num_experts_per_tok"] if experts else 0,
        special=special_attention(config),
        reshaped=reshaped_logits(config),
        plain=_plain(names, layers),
    )


def _plain(names: set[str], layers: int) -> bool:
    """Whether each layer has the parts that training knows, by the names of its weights."""
    with_attention, with_mlp = set(), set()
    for name in names:
        before, _, rest = name.partition("layers.")
        number, _, part = rest.partition(".")
        if before in ("", "model.") and number.isdecimal():
            if part.startswith("self_attn."):
                with_attention.add(int(number))
            elif part.startswith(("mlp.", "block_sparse_moe.")):
                with_mlp.add(int(number))
    return with_attention == with_mlp == set(range(layers))
