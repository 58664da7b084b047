"""A dense decoder cut into the stages of a pipeline, each with a range of its layers.

The pieces stay in the model that they were cut from, under the names that they had, and what belongs to other ranks
is dropped from it: names, adapters and checkpoints need to know nothing of pipelines. A stage runs the decoder's own
forward, so masks and rotary embeddings are those of the whole model.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from actors.training.layout import layer_ranges
from cluster.errors import ConfigError

_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}

Loss = Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of head, hidden states, labels and position ids, as `objectives.sft.summed_loss`."""


class Stage(torch.nn.Module):
    """One range of layers: the first stage begins with the embedding, the last ends with norm, head and loss.

    What passes from stage to stage are hidden states in the dtype of the embedding's weights, which is that of the
    residual stream inside the model: a cut changes no number. (bf16 beside an adapter, else fp32.)
    """

    def __init__(self, decoder: Any, head: Any, loss: Loss, precision: str, *, first: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = head
        self._loss = loss
        self._precision = precision
        self._input = "input_ids" if first else "inputs_embeds"

    def forward(self, inputs: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[B, T, H] hidden states; of the last stage the summed loss, a scalar.

        `inputs` are [B, T] token ids on the first stage, else the hidden states of the stage before.
        """
        low = self._precision == "bf16"
        with torch.autocast(inputs.device.type, torch.bfloat16) if low else nullcontext():
            given = {self._input: inputs, "position_ids": position_ids, "use_cache": False}
            hidden: torch.Tensor = self.decoder(**given).last_hidden_state
            return hidden if self.head is None else self._loss(self.head, hidden, labels, position_ids)


def cut(model: Any, mine: Sequence[int], count: int, loss: Loss, precision: str) -> list[Stage]:
    """The stages `mine` of `count` of `model` (transformers' or PEFT's), which keeps the parts of these alone."""
    decoder = model.get_decoder()
    _require_plain(decoder)
    ranges = layer_ranges(len(decoder.layers), count)
    head = model.get_output_embeddings()
    stages = [
        Stage(
            _part(decoder, ranges[each], first=each == 0, last=each == count - 1),
            head if each == count - 1 else None,
            loss,
            precision,
            first=each == 0,
        )
        for each in mine
    ]
    kept = _part(decoder, [layer for each in mine for layer in ranges[each]], first=0 in mine, last=count - 1 in mine)
    for name, part in kept.named_children():
        setattr(decoder, name, part)
    if count - 1 not in mine:
        # PEFT's own set_output_embeddings is the inner model's.
        model.set_output_embeddings(torch.nn.Identity())
    return stages


def _part(decoder: Any, layers: Sequence[int], *, first: bool, last: bool) -> Any:
    """`decoder` with these layers of its own only; the modules are the same objects, not copies."""
    part = copy.copy(decoder)
    part._modules = dict(decoder._modules)  # copy.copy shares this dict
    chosen = torch.nn.ModuleList()
    for layer in layers:
        chosen.add_module(str(layer), decoder.layers[layer])  # its number in the whole model stays its name
    part.layers = chosen
    if not first:
        part.embed_tokens = torch.nn.Identity()
    if not last:
        part.norm = torch.nn.Identity()
    return part


def _require_plain(decoder: Any) -> None:
    """Refuse what a stage would compute otherwise than the whole model."""
    kind = decoder.config.model_type
    parts = {name for name, _ in decoder.named_children()}
    if parts != _PARTS:
        raise ConfigError(
            f"{kind} models are no plain stack of layers (parts: {', '.join(sorted(parts))}), so they cannot be cut.",
            hint="Use parallel.pipeline 1.",
        )
    if len(set(getattr(decoder.config, "layer_types", None) or ())) > 1:
        # transformers looks a layer's mask up by its place among the layers present.
        raise ConfigError(
            f"This {kind} model mixes kinds of layers, which a stage cannot tell apart.",
            hint="Use parallel.pipeline 1.",
        )
