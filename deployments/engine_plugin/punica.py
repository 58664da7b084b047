"""vLLM's CPU computation of LoRA, with all adapters of a batch in one product (see `mends`, the second fault).

vLLM imports this class by name when an engine with LoRA starts, so it may import vLLM at the top.
"""

import logging
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from deployments.engine_plugin.stacked import Mix, expand, mix, shrink, spread

logger = logging.getLogger(__name__)


class StackedPunicaWrapper(PunicaWrapperCPU):
    """Looks once per change of the batch whose tokens are whose; every layer of the model then uses the same.

    Prefill and decode need no difference here: both give every token of the batch its slot. What is not
    overridden (`apply_lora_full_linear`) masks tokens without an adapter itself.
    """

    _tokens: Mix | None = None
    _sampled: Mix | None = None

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self._tokens = mix(self.token_lora_indices)
        self._sampled = mix(self.sampler_indices)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_kwargs: Any,
    ) -> None:
        """For every slice i, which starts where the one before ends: y[:, slice] += scale · x Aᵢᵀ Bᵢᵀ."""
        if self._tokens is None:
            return
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        offset = 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            inner = shrink(x, a, self._tokens, scale)
            expand(inner, b, self._tokens, y, offset=offset, width=width)
            offset += width

    def add_shrink(
        self,
        y: tuple[torch.Tensor, ...] | torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        scale: float,
        **_kwargs: Any,
    ) -> None:
        """For every slice i: y[i] = scale · x Aᵢᵀ. For layers that are split over workers, with `add_expand`."""
        x = x.view(-1, x.shape[-1])
        for out, weights in zip(y, lora_a_stacked, strict=True):
            out = out.view(-1, out.shape[-1])
            rank = weights.shape[-2]
            out[:, :rank] = 0 if self._tokens is None else shrink(x, weights, self._tokens, scale).sum(1)

    def add_expand(
        self,
        y: torch.Tensor,
        x: tuple[torch.Tensor, ...] | torch.Tensor,
        lora_b_stacked: tuple[torch.Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        **_kwargs: Any,
    ) -> None:
        """For every slice i, which starts where the one before ends: y[:, slice] += x[i] Bᵢᵀ."""
        if self._tokens is None:
            return
        y = y.view(-1, y.shape[-1])
        offset = offset_start
        for inner, weights, width in zip(x, lora_b_stacked, output_slices, strict=True):
            expand(spread(inner, self._tokens), weights, self._tokens, y, offset=offset, width=width)
            offset += width

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, **_kwargs: Any
    ) -> None:
        if self._tokens is not None:
            expand(spread(x, self._tokens), lora_b_stacked, self._tokens, y)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **_kwargs: Any,
    ) -> None:
        if self._sampled is None:
            return
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        if x.shape[0] != self.sampler_indices.shape[0]:
            # `prompt_logprobs`: the rows are one request's prompt, and the interface does not say whose. With
            # the usual adapters, which leave lm_head alone, there is nothing to add.
            if lora_b_stacked[self._sampled.slots].any():
                logger.warning("prompt log-probabilities leave out what the adapter changes in lm_head")
            return
        expand(shrink(x, lora_a_stacked, self._sampled, scale), lora_b_stacked, self._sampled, y)
