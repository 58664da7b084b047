"""LoRA's two matrix products for a batch in which every token has its own adapter, or none.

Tokens are grouped by adapter once per step, then each group is one plain matrix product. A token without an
adapter (index -1) is in no group: nothing is added to it. This module knows torch, and nothing of vLLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

NO_ADAPTER = -1


@dataclass(frozen=True)
class Group:
    """The tokens of one adapter: `slot` in the stacked weights, `rows` [n] int64, or None for the whole batch."""

    slot: int
    rows: torch.Tensor | None


def group(slots: torch.Tensor) -> tuple[Group, ...]:
    """`slots` [tokens] int64 (-1: no adapter) as one group per adapter in use."""
    present = torch.unique(slots).tolist()
    if len(present) == 1 and present[0] != NO_ADAPTER:
        return (Group(present[0], None),)
    return tuple(Group(slot, (slots == slot).nonzero().squeeze(1)) for slot in present if slot != NO_ADAPTER)


def shrink(x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, groups: Sequence[Group], scale: float) -> None:
    """out[t, :r] = scale · A(t) x[t], and 0 for a token without an adapter.

    x [tokens, in]; weights [slots, (1,) r, in]; out [tokens, ≥ r], usually float32. The product is taken in the
    weights' type, as the trainer takes it.
    """
    rank = weights.shape[-2]
    if not (len(groups) == 1 and groups[0].rows is None):
        out[:, :rank] = 0
    for member in groups:
        a = weights[member.slot].reshape(rank, -1)
        rows = x if member.rows is None else x[member.rows]
        product = torch.mm(rows.to(a.dtype), a.t()).to(out.dtype).mul_(scale)
        if member.rows is None:
            out[:, :rank] = product
        else:
            out[member.rows, :rank] = product


def expand(
    x: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    groups: Sequence[Group],
    *,
    offset: int = 0,
    width: int | None = None,
    add: bool = True,
) -> None:
    """out[t, offset:offset+width] += B(t) x[t] (or = with `add` false); a token without an adapter is left alone.

    x [tokens, r]; weights [slots, (1,) width, r]; out [tokens, features]. Weights and `out` may be padded
    differently, so only the columns that both have are written.
    """
    features = weights.shape[-2]
    columns = min(features, out.shape[1] - offset, features if width is None else width)
    target = out[:, offset : offset + columns]
    for member in groups:
        b = weights[member.slot].reshape(features, -1)[:columns]
        rows = x if member.rows is None else x[member.rows]
        product = torch.mm(rows.to(out.dtype), b.t().to(out.dtype))
        if member.rows is None:
            target.add_(product) if add else target.copy_(product)
        elif add:
            target.index_add_(0, member.rows, product)
        else:
            target[member.rows] = product
