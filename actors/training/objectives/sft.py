"""Supervised fine-tuning: cross-entropy of the completion's tokens, computed only where there is one to learn.

The objective is a module around the model, because DDP and FSDP hook into the forward of what they wrap.
It gives a *sum*; the loop divides by the loss tokens of the whole global batch, so that neither accumulation
nor the number of workers changes the gradient. It knows nothing about workers, steps or the optimizer.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional

from actors.training.batching import NO_LOSS, MicroBatch
from actors.training.context import Context
from cluster.errors import ConfigError

_HEAD_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def targets(labels: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """[B, T-1]: what position t must predict, or `NO_LOSS`.

    The first token of a packed example is no target: the token before it belongs to another example.
    """
    following = labels[:, 1:]
    return following.masked_fill(position_ids[:, 1:] == 0, NO_LOSS)


def count_loss_tokens(batch: MicroBatch) -> int:
    """Terms in the sum that `SftObjective` returns for `batch`."""
    return int((targets(batch.labels, batch.position_ids) != NO_LOSS).sum())


def summed_loss(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    labels: torch.Tensor,
    position_ids: torch.Tensor,
) -> torch.Tensor:
    """Summed cross-entropy in nats, fp32 scalar, of [B, T, H] `hidden` (after the last norm); labels are [B, T].

    Logits exist for the loss positions alone, [N, V] instead of [B, T, V]. Without any, the loss is a 0 that
    still has a gradient (of zeros), as those who exchange gradients expect.
    """
    return _loss_of(head, hidden[:, :-1], targets(labels, position_ids))


def _loss_of(head: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    learned = wanted != NO_LOSS
    logits = head(hidden[learned])
    return functional.cross_entropy(logits.float(), wanted[learned], reduction="sum")


class SftObjective(torch.nn.Module):
    """`model` is a causal language model of transformers, with its adapter in place.

    Packing: transformers builds a block-diagonal causal mask from position ids that restart, but only when it
    gets neither an attention mask nor a cache (`masking_utils._preprocess_mask_arguments`, 5.19).
    """

    def __init__(self, model: Any, precision: str) -> None:
        super().__init__()
        reshaped = [name for name in _HEAD_TRANSFORMS if getattr(model.config, name, None) is not None]
        if reshaped:
            raise ConfigError(
                f"{model.config.model_type} models reshape their logits ({', '.join(reshaped)}), "
                "which the sft objective does not do.",
                hint="Choose another base model.",
            )
        self.model = model
        self.precision = precision
        self.context: Context | None = None
        """Set where ranks share each row: the loss is then that of this rank's part of the tokens."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """`summed_loss` of the model's predictions. Inputs are [B, T] int64, whole rows also where ranks share them."""
        low = self.precision == "bf16"
        with torch.autocast(input_ids.device.type, torch.bfloat16) if low else nullcontext():
            decoder = self.model.get_decoder()
            head = self.model.get_output_embeddings()
            if self.context is None:
                hidden = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
                return summed_loss(head, hidden, labels, position_ids)
            whole = self.context.padded(position_ids)
            hidden = decoder(
                input_ids=self.context.part(input_ids, 0),
                position_ids=self.context.part(whole, 0),
                use_cache=False,
                # For the attention, which transformers hands what a decoder does not know.
                context=self.context,
                row_position_ids=whole,
            ).last_hidden_state
            return _loss_of(head, hidden, self.context.targets(targets(labels, position_ids)))
