"""LoRA's two matrix products for a batch in which every token has its own adapter, or none.

The adapters in use are multiplied as if they were one of their summed rank: A's below each other, B's side by side.
Between the two products, what is not of the token's own adapter is set to zero. That computes more than is needed, and
is still several times faster than a product per adapter: each costs a CPU as much as hundreds of such columns
(docs/benchmarks/adapters.md). A token without an adapter (slot -1) gets exact zeros. It holds only for finite weights
(0 · NaN is NaN, also in another's answer), so a replica lets no others in. This module knows torch, and nothing of
vLLM.
"""

from dataclasses import dataclass

import torch

_SPARSE = 2
"""Slots in use are taken as a range, which copies nothing, unless the range is so many times wider."""


@dataclass(frozen=True)
class Mix:
    """Whose the tokens of a batch are.

    `slots`: which of the stacked weights are in use, as a range or as numbers [n] int64. `others` [tokens, n, 1] bool:
    where a slot is not the token's; None if all tokens have the only one.
    """

    slots: slice | torch.Tensor
    others: torch.Tensor | None


def mix(slots: torch.Tensor) -> Mix | None:
    """`slots` [tokens] int64 (-1: no adapter) as a `Mix`; None if no token has an adapter."""
    used = torch.unique(slots[slots >= 0])
    if not len(used):
        return None
    low, high = int(used[0]), int(used[-1]) + 1
    dense = high - low <= _SPARSE * len(used)
    numbers = torch.arange(low, high, device=slots.device) if dense else used
    others = slots[:, None] != numbers
    return Mix(slice(low, high) if dense else used, others.unsqueeze(2) if others.any() else None)


def shrink(x: torch.Tensor, weights: torch.Tensor, mix: Mix, scale: float = 1.0) -> torch.Tensor:
    """scale · A x of each token, in the columns of its adapter, and zeros in the others': [tokens, n, r].

    x [tokens, in]; weights [slots, (1,) r, in]. In the weights' type, as the trainer computes it.
    """
    rank, features = weights.shape[-2:]
    a = weights[mix.slots].reshape(-1, features)
    inner = torch.mm(x.to(a.dtype), a.t())
    if scale != 1:
        inner.mul_(scale)
    return _own(inner.view(len(x), -1, rank), mix)


def spread(inner: torch.Tensor, mix: Mix) -> torch.Tensor:
    """`inner` [tokens, r], which does not say whose adapter's it is, as `shrink` gives it: [tokens, n, r]."""
    columns = 1 if mix.others is None else mix.others.shape[1]
    return _own(inner[:, None, :].repeat(1, columns, 1), mix)


def expand(
    inner: torch.Tensor,
    weights: torch.Tensor,
    mix: Mix,
    out: torch.Tensor,
    *,
    offset: int = 0,
    width: int | None = None,
) -> None:
    """out[t, offset:offset+width] += B x of each token; one without an adapter is left alone.

    inner [tokens, n, r] from `shrink` or `spread`; weights [slots, (1,) width, r]; out [tokens, features]. Weights and
    `out` may be padded differently, so only the columns that both have are written.
    """
    features = weights.shape[-2]
    columns = min(features, out.shape[1] - offset, features if width is None else width)
    b = _side_by_side(weights)[:columns, mix.slots].flatten(1).to(out.dtype)
    out[:, offset : offset + columns].addmm_(inner.flatten(1).to(out.dtype), b.t())


def _own(inner: torch.Tensor, mix: Mix) -> torch.Tensor:
    return inner if mix.others is None else inner.masked_fill_(mix.others, 0)


def _side_by_side(weights: torch.Tensor) -> torch.Tensor:
    """The B's as [width, slots, r], contiguous: a range of slots is one matrix without a copy.

    The tensor is laid out so in memory the first time that it is seen. Its shape, and what is written into it, stay
    the same, so its owner notices nothing.
    """
    by_slot = weights.flatten(0, -3)
    by_feature = by_slot.transpose(0, 1)
    if not by_feature.is_contiguous():
        with torch.inference_mode(False):  # what is made in that mode cannot be written into outside of it
            weights.data = by_feature.clone(memory_format=torch.contiguous_format).transpose(0, 1).view(weights.shape)
        by_feature = weights.flatten(0, -3).transpose(0, 1)
    return by_feature
