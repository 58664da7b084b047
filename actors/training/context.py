"""One sequence over several ranks, as DeepSpeed-Ulysses does it (Jacobs et al. 2023, arXiv:2309.14509).

Each rank of a context group has a part of every row's tokens, and all that a decoder does token by token (norms,
projections, MLPs, the loss) it does on that part. Attention alone sees whole rows: all-to-all gives every rank all
tokens of a share of the heads, where it runs the attention of packed rows as it is, and gives the result back.
So packing stays exact and the work even, wherever examples begin. docs/decisions/0011 says why no ring.

Knows transformers' attention interface and process groups. Does not know gradients: each rank's are those of its
own part's loss, and whoever exchanges gradients sums them.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from actors.training import attention
from actors.training.batching import NO_LOSS
from actors.training.shape import special_attention
from cluster.errors import ConfigError

CONTEXT = "flywheel_context"


@dataclass(frozen=True)
class Share:
    """The query heads of one rank, and the heads of keys and values that they read."""

    queries: range
    keys: range


def shares(heads: int, key_heads: int, ranks: int) -> tuple[Share, ...]:
    """`heads` spread over `ranks` as evenly as may be; a key head that two ranks need goes to both.

    Head counts need not be divisible: SmolLM2-135M has 9 heads on 3 key heads, which two ranks share as 4 and 5.
    """
    group = heads // key_heads
    bounds = [heads * rank // ranks for rank in range(ranks + 1)]
    return tuple(
        Share(range(first, end), range(first // group, (end - 1) // group + 1)) for first, end in pairwise(bounds)
    )


class Context:
    """A group of ranks that share every row, seen from one of them."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.ranks = group.size()
        self.rank = group.rank()

    def padded(self, position_ids: torch.Tensor) -> torch.Tensor:
        """[B, T'] whole rows, T' the next multiple of the ranks: the padding is one more example behind the others."""
        gap = -position_ids.shape[1] % self.ranks
        return torch.cat([position_ids, torch.arange(gap).to(position_ids).expand(len(position_ids), gap)], dim=1)

    def part(self, tokens: torch.Tensor, filler: int) -> torch.Tensor:
        """[B, T'/ranks] of [B, T] or [B, T'] `tokens`, which every rank of the group has; `filler` pads T to T'."""
        padded = functional.pad(tokens, (0, -tokens.shape[1] % self.ranks), value=filler)
        return padded.chunk(self.ranks, dim=1)[self.rank].contiguous()

    def targets(self, wanted: torch.Tensor) -> torch.Tensor:
        """This rank's part of [B, T-1] `wanted`, cut from the whole rows: borders of parts lose no target."""
        return self.part(functional.pad(wanted, (0, 1), value=NO_LOSS), NO_LOSS)


def prepare(model: Any, group: ProcessGroup, tensor: int) -> Context:
    """Make `model` (transformers' or PEFT's), which `tensor` ranks cut by heads, attend over the ranks of `group`."""
    config = model.config
    kind = config.model_type
    special = special_attention(config.to_dict())
    if special:
        raise ConfigError(
            f"{kind} models attend in a way that context parallelism does not do ({', '.join(special)}).",
            hint="Use parallel.context 1.",
        )
    heads = config.num_attention_heads // tensor
    if group.size() > heads:
        raise ConfigError(
            f"parallel.context {group.size()} is more than the {heads} attention heads that a rank has of {kind}.",
            hint="Ranks of a context group share the heads: use fewer.",
        )
    model.set_attn_implementation(CONTEXT)
    return Context(group)


# Lengths of examples are data: a compiler would make a program for each.
@torch.compiler.disable
def context_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: None,
    *,
    context: Context,
    row_position_ids: torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each example of whole rows; `row_position_ids` are theirs, [B, T'].

    `query` is [B, H, T'/ranks, D], `key` and `value` have H or fewer heads. Returns [B, T'/ranks, H, D].
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # rotary embeddings may have left fp32, twice the bytes to send
        query, key, value = (each.to(torch.get_autocast_dtype(kind)) for each in (query, key, value))
    per_key = query.shape[1] // key.shape[1]
    spread = shares(query.shape[1], key.shape[1], context.ranks)
    mine = spread[context.rank]
    query, key, value = _to_heads(query, key, value, spread, context)
    if mine.queries.start % per_key or len(mine.queries) % per_key:  # the share begins or ends inside a group
        reads = torch.tensor([head // per_key - mine.keys.start for head in mine.queries], device=key.device)
        key, value = key.index_select(1, reads), value.index_select(1, reads)
    attend = attention.packed_attention if kind == "cpu" else attention.varlen_attention
    attended, _weights = attend(
        module, query, key, value, None, position_ids=row_position_ids, scaling=scaling, dropout=dropout
    )
    return _to_tokens(attended, spread, context), None


def _to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spread: tuple[Share, ...], context: Context
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From all heads of a part to this rank's share of them, [B, H/ranks, T', D], in one exchange of all three."""
    rows, _heads, tokens, depth = query.shape
    parcels = [
        part[:, heads.start : heads.stop]
        for share in spread
        for part, heads in ((query, share.queries), (key, share.keys), (value, share.keys))
    ]
    sizes = [len(share.queries) + 2 * len(share.keys) for share in spread]
    mine = spread[context.rank]
    arrived = _exchange(
        torch.cat(parcels, dim=1).transpose(0, 1), [sizes[context.rank]] * context.ranks, sizes, context
    ).view(context.ranks, sizes[context.rank], rows, tokens, depth)
    whole = arrived.permute(2, 1, 0, 3, 4).reshape(rows, sizes[context.rank], context.ranks * tokens, depth)
    query, key, value = whole.split([len(mine.queries), len(mine.keys), len(mine.keys)], dim=1)
    return query, key, value


def _to_tokens(attended: torch.Tensor, spread: tuple[Share, ...], context: Context) -> torch.Tensor:
    """From [B, T', H/ranks, D] back to all heads of this rank's part, [B, T'/ranks, H, D]."""
    rows, tokens, heads, depth = attended.shape
    parts = attended.view(rows, context.ranks, tokens // context.ranks, heads, depth).permute(1, 3, 0, 2, 4)
    sizes = [len(share.queries) for share in spread]
    return _exchange(parts.flatten(0, 1), sizes, [heads] * context.ranks, context).permute(1, 2, 0, 3).contiguous()


def _exchange(parcels: torch.Tensor, arriving: list[int], leaving: list[int], context: Context) -> torch.Tensor:
    """All-to-all over the first dimension, with its gradient."""
    moved: torch.Tensor = wait_tensor(
        all_to_all_single_autograd(parcels.contiguous(), arriving, leaving, context.group)
    )
    return moved


def _no_mask(*_: Any, **__: Any) -> None:
    """The examples' bounds come from the position ids."""


AttentionInterface.register(CONTEXT, context_attention)
AttentionMaskInterface.register(CONTEXT, _no_mask)
