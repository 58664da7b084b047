"""Attention over packed rows on a CPU: each example by itself, in fp32.

transformers' own way is one dense [T, T] mask per row, most of which is cut away again, and torch's CPU kernel
(2.13) runs the backward of bf16 attention several times slower than that of fp32. On SmolLM2-135M with rows of
512 tokens and examples of 46 the two together cost a quarter of a training step. Delete when torch has a fast
variable-length attention for CPUs. It knows transformers' attention interface and nothing of training.
"""

from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface

from actors.training.shape import special_attention

PACKED = "flywheel_packed"


def implementation(config: Any, device: torch.device) -> str:
    """The attention to ask transformers for: ours where it is exact and faster, torch's otherwise.

    Models with a sliding window or capped scores need more than a causal block, which ours does not do.
    """
    return PACKED if device.type == "cpu" and not special_attention(config.to_dict()) else "sdpa"


def example_lengths(position_ids: torch.Tensor) -> list[int]:
    """Tokens of each example in [B, T] position ids, row after row; an example begins where they do not go on."""
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids.diff(dim=1) != 1
    starts = begins.flatten().nonzero().flatten()
    lengths: list[int] = starts.diff(append=starts.new_tensor([position_ids.numel()])).tolist()
    return lengths


# The number of examples in a row and their lengths are data: a compiler would make a program for each.
@torch.compiler.disable
def packed_attention(
    _module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: None,
    *,
    position_ids: torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each example. `query` is [B, H, T, D], `key` and `value` have H or fewer heads.

    Returns [B, T, H, D]. Signature of `transformers.AttentionInterface`; called without `position_ids` it fails,
    rather than let examples see each other.
    """
    rows, _heads, tokens, _depth = query.shape
    lengths = example_lengths(position_ids.expand(rows, tokens))

    def examples(heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Rows one after the other, [1, H, B·T, D]; the backward of split is a single concatenation.
        parts: tuple[torch.Tensor, ...] = heads.transpose(0, 1).flatten(1, 2)[None].float().split(lengths, dim=2)
        return parts

    # Autocast would turn the inputs back into bf16.
    with torch.autocast(query.device.type, enabled=False):
        attended = [
            functional.scaled_dot_product_attention(
                *one, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=True
            )
            for one in zip(examples(query), examples(key), examples(value), strict=True)
        ]
    together = torch.cat(attended, dim=2).to(query.dtype)
    return together[0].unflatten(1, (rows, tokens)).permute(1, 2, 0, 3).contiguous(), None


def varlen_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: None,
    *,
    position_ids: torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`packed_attention` by the flash kernel of a GPU, which takes half precision alone and drops nothing out."""
    rows, _heads, tokens, _depth = query.shape
    if dropout or query.dtype == torch.float32:
        packed: tuple[torch.Tensor, None] = packed_attention(
            module, query, key, value, mask, position_ids=position_ids, scaling=scaling, dropout=dropout
        )
        return packed
    lengths = example_lengths(position_ids.expand(rows, tokens))
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device=query.device, dtype=torch.int32)
    heads_last = [part.transpose(1, 2).flatten(0, 1) for part in (query, key, value)]  # [B·T, H, D]
    attended: torch.Tensor = varlen_attn(
        *heads_last, ends, ends, max(lengths), max(lengths), scale=scaling, window_size=(-1, 0), enable_gqa=True
    )
    return attended.unflatten(0, (rows, tokens)), None


def _no_mask(*_: Any, **__: Any) -> None:
    """The examples' bounds come from the position ids."""


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, _no_mask)
