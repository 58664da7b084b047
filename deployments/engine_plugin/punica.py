"""vLLM's CPU computation of LoRA, with products grouped by adapter (see `mends`, the second fault).

vLLM imports this class by name when an engine with LoRA starts, so it may import vLLM at the top.
"""

import logging
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from deployments.engine_plugin.grouped import Group, expand, group, shrink

logger = logging.getLogger(__name__)


class GroupedPunicaWrapper(PunicaWrapperCPU):
    """Groups the tokens once per change of the batch; every layer of the model then uses the same groups.

    Prefill and decode need no difference here: both give every token of the batch its slot. What is not
    overridden (`apply_lora_full_linear`) masks tokens without an adapter itself.
    """

    _tokens: tuple[Group, ...] = ()
    _sampled: tuple[Group, ...] = ()

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self._tokens = group(self.token_lora_indices)
        self._sampled = group(self.sampler_indices)

    def add_shrink(
        self,
        y: tuple[torch.Tensor, ...] | torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        scale: float,
        **_kwargs: Any,
    ) -> None:
        """For every slice i: y[i] = scale · x Aᵢᵀ."""
        x = x.view(-1, x.shape[-1])
        for out, weights in zip(y, lora_a_stacked, strict=True):
            shrink(x, weights, out.view(-1, out.shape[-1]), self._tokens, scale)

    def add_expand(
        self,
        y: torch.Tensor,
        x: tuple[torch.Tensor, ...] | torch.Tensor,
        lora_b_stacked: tuple[torch.Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **_kwargs: Any,
    ) -> None:
        """For every slice i, which starts where the one before ends: y[:, slice] += x[i] Bᵢᵀ."""
        y = y.view(-1, y.shape[-1])
        offset = offset_start
        for inner, weights, width in zip(x, lora_b_stacked, output_slices, strict=True):
            expand(inner, weights, y, self._tokens, offset=offset, width=width, add=add_inputs)
            offset += width

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        if self._tokens:
            super().add_lora_linear(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **kwargs)

    def add_lora_embedding(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        add_inputs: bool = True,
        **_kwargs: Any,
    ) -> None:
        expand(x, lora_b_stacked, y, self._tokens, add=add_inputs)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **_kwargs: Any,
    ) -> None:
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        groups = self._sampled
        if x.shape[0] != self.sampler_indices.shape[0]:
            # `prompt_logprobs`: the rows are one request's prompt, and the interface does not say whose. With
            # the usual adapters, which leave lm_head alone, there is nothing to add.
            if any(bool(lora_b_stacked[member.slot].any()) for member in groups):
                logger.warning("prompt log-probabilities leave out what the adapter changes in lm_head")
            return
        if buffer is None:
            rank = lora_b_stacked.shape[-1]
            buffer = torch.zeros((x.shape[0], rank), dtype=torch.float32, device=x.device)
        shrink(x, lora_a_stacked, buffer, groups, scale)
        expand(buffer, lora_b_stacked, y, groups)
