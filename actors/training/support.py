"""Which models can be trained in which way. Refused before anything is started, with the reason and the way out.

What these lists allow is tested to learn what one process learns (tests/actors/training/test_equivalence_families.py).
Whoever cuts a model looks once more at what it needs there (`models/`, `context`, `expert`); this is for the plan and
for the driver, and works on a model's config and the headers of its weights, without torch.
"""

import json
from pathlib import Path
from typing import Final

from safetensors import SafetensorError

from actors.training.config import TrainConfig
from actors.training.layout import Layout, layer_ranges, require_divisible
from actors.training.shape import Shape, read
from cluster.errors import ConfigError
from cluster.models import StoredModel

_DENSE: Final = ("gemma", "llama", "mistral", "qwen2", "qwen3", "smollm3")
_MIXTURES: Final = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
FAMILIES: Final = {
    "tensor": _DENSE,
    "pipeline": (*_DENSE, "qwen3_moe"),
    "context": (*_DENSE, "qwen3_moe"),
    "expert": _MIXTURES,
}
_IN_SHAPE = "Choose a base in the shape of Llama (SmolLM2, Qwen, Mistral), or a mixture such as Qwen3-MoE."


def shape_of(base: Path) -> Shape:
    """The shape of the model in the folder `base`; `ConfigError` if it is none that can be trained."""
    try:
        return read(base)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError, SafetensorError) as error:
        family = _family(base)
        what = f"{base.name} ({family})" if family else base.name
        raise ConfigError(
            f"The shape of {what} cannot be read: {type(error).__name__}: {error}.",
            hint=f"Look at config.json and *.safetensors in {base}. {_IN_SHAPE}",
        ) from None


def require(config: TrainConfig, shape: Shape) -> None:
    """`ConfigError` if a model of this shape cannot be trained as `config` says."""
    if not shape.parameters:
        raise ConfigError("The base has a config, but no weights.", hint="Give a folder with *.safetensors.")
    if config.objective.kind == "contrastive":
        _adapter(config, shape)
        return
    if not shape.plain:
        raise ConfigError(
            f"{shape.family} models are not made of layers with self_attn and mlp, which training can spread.",
            hint=_IN_SHAPE,
        )
    if shape.reshaped:
        raise ConfigError(
            f"{shape.family} models reshape their logits ({', '.join(shape.reshaped)}), which the sft objective does "
            "not do.",
            hint="Choose another base model.",
        )
    _adapter(config, shape)
    layout = Layout.of(config.parallel, config.parallel.workers.max)
    _tensor(layout, shape)
    _pipeline(config, shape)
    _context(layout, shape)
    _expert(config, layout, shape)


def require_kind(config: TrainConfig, base: StoredModel) -> None:
    """`ConfigError` if the base is not what the objective is for."""
    wanted = {"sft": "causal-lm", "contrastive": "sentence-embedder"}[config.objective.kind]
    if base.kind != wanted:
        other = "contrastive" if base.kind == "sentence-embedder" else "sft"
        raise ConfigError(
            f"objective.kind {config.objective.kind} teaches a {wanted}; {base.name} is a {base.kind}.",
            hint=f"Set objective.kind to {other}, or model.base to a {wanted}.",
        )


def _adapter(config: TrainConfig, shape: Shape) -> None:
    targets = config.adapter.target_modules
    if config.adapter.kind == "none":
        return
    if config.adapter.dropout and shape.experts and _on_experts(config, shape):
        raise ConfigError(
            f"adapter.dropout {config.adapter.dropout}: an adapter on fused experts is a change of whole matrices, "
            "whose input is not dropped.",
            hint="Set adapter.dropout 0, or choose adapter.target_modules among q_proj, k_proj, v_proj, o_proj.",
        )
    if targets == "all-linear":
        return
    known = sorted({name.rpartition(".")[2] for name, _, _ in shape.matrices})
    strange = [target for target in targets if target not in known]
    if strange:
        raise ConfigError(
            f"adapter.target_modules names {', '.join(map(repr, strange))}, of which the layers of the base have none.",
            hint=f"Use all-linear, or some of: {', '.join(known)}.",
        )


def _tensor(layout: Layout, shape: Shape) -> None:
    if layout.tensor == 1:
        return
    if shape.experts:
        raise ConfigError(
            f"parallel.tensor {layout.tensor} does not cut the experts of {shape.family} models.",
            hint="Spread whole experts with parallel.expert, or use strategy fsdp.",
        )
    _require_family("tensor", layout.tensor, shape)
    require_divisible(
        layout.tensor,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
    )


def _pipeline(config: TrainConfig, shape: Shape) -> None:
    axes = config.parallel
    if axes.pipeline == 1:
        return
    _require_family("pipeline", axes.pipeline, shape)
    if "layer_types" in shape.special:
        raise ConfigError(
            f"This {shape.family} model mixes kinds of layers, which a stage of a pipeline cannot tell apart.",
            hint="Use parallel.pipeline 1.",
        )
    layer_ranges(shape.layers, axes.pipeline * (2 if axes.schedule == "interleaved" else 1))


def _context(layout: Layout, shape: Shape) -> None:
    if layout.context == 1:
        return
    if shape.special:
        raise ConfigError(
            f"{shape.family} models attend in a way that context parallelism does not do ({', '.join(shape.special)}).",
            hint="Use parallel.context 1.",
        )
    _require_family("context", layout.context, shape)
    heads = shape.heads // layout.tensor
    if layout.context > heads:
        raise ConfigError(
            f"parallel.context {layout.context} is more than the {heads} attention heads that a rank has of "
            f"{shape.family}.",
            hint="Ranks of a context group share the heads: use fewer.",
        )


def _expert(config: TrainConfig, layout: Layout, shape: Shape) -> None:
    if layout.expert == 1:
        return
    if not shape.experts:
        raise ConfigError(
            f"parallel.expert {layout.expert}: {shape.family} models have no experts that could be spread.",
            hint="Use parallel.expert 1.",
        )
    _require_family("expert", layout.expert, shape)
    if shape.experts % layout.expert:
        raise ConfigError(
            f"The {shape.experts} experts of this {shape.family} model cannot be shared by {layout.expert} ranks.",
            hint="Make parallel.expert a divisor of the number of experts.",
        )
    copies = layout.data * layout.context // layout.expert
    if shape.hidden % copies or 2 * shape.intermediate % copies:
        raise ConfigError(
            f"Experts of {shape.hidden} × {2 * shape.intermediate} cannot be cut for the {copies} ranks that hold "
            "each of them.",
            hint="Raise parallel.expert or use fewer workers.",
        )
    if config.adapter.kind == "lora" and _on_experts(config, shape):
        raise ConfigError(
            "An adapter on fused experts is a change of whole matrices, which ranks that hold some experts cannot add.",
            hint="Choose adapter.target_modules among the attention's: q_proj, k_proj, v_proj, o_proj; all-linear "
            "means the experts too. Or use parallel.expert 1.",
        )


def _on_experts(config: TrainConfig, shape: Shape) -> bool:
    """Whether an adapter would change more of a mixture than its attention."""
    targets = config.adapter.target_modules
    attention = {name.rpartition(".")[2] for name, _, _ in shape.matrices if ".self_attn." in name}
    return targets == "all-linear" or bool(set(targets) - attention)


def _require_family(axis: str, size: int, shape: Shape) -> None:
    families = FAMILIES[axis]
    if shape.family not in families:
        raise ConfigError(
            f"parallel.{axis} {size}: {shape.family} models have not been shown to learn so what one process learns.",
            hint=f"Use parallel.{axis} 1, with strategy fsdp where memory is short. Known: {', '.join(families)}.",
        )


def _family(base: Path) -> str:
    try:
        return str(json.loads((base / "config.json").read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
