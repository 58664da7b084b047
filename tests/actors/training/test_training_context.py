"""Attention over parts of rows equals attention over whole rows: outputs, gradients, whatever the head counts."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from actors.training import attention
from actors.training.context import Context, Share, context_attention, prepare, shares
from actors.training.engine import Place
from app.bench.gang import Gang
from cluster.errors import ConfigError

# Examples of 5, 1, 7 and 4, 9, 0 tokens: most borders of parts lie inside one.
POSITIONS = torch.tensor([[*range(5), *range(1), *range(7)], [*range(4), *range(9)]])


def _tensors(heads: int, key_heads: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(heads)
    tokens = POSITIONS.shape[1] + 3
    return tuple(
        torch.randn(2, count, tokens, 8, generator=draw).requires_grad_() for count in (heads, key_heads, key_heads)
    )


def _masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Plain attention under a dense mask of whole rows: [B, T, H, D]."""
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids.diff(dim=1) != 1
    example = begins.cumsum(1)
    mask = (example[:, :, None] == example[:, None, :]).tril()[:, None]
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def _deviations(place: Place, heads: int, key_heads: int) -> list[float]:
    """How far output and the three gradients of this rank's part are from those of whole rows."""
    context = Context(torch.distributed.group.WORLD)
    whole = context.padded(POSITIONS)
    inputs = [tensor.detach()[:, :, : whole.shape[1]].requires_grad_() for tensor in _tensors(heads, key_heads)]
    wanted = _masked(*inputs, whole)
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    wanted.mul(weight).sum().backward()

    def part(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(context.ranks, dim=dim)[context.rank]

    parts = [part(tensor.detach(), 2).clone().requires_grad_() for tensor in inputs]
    found, _ = context_attention(None, *parts, None, context=context, row_position_ids=whole)
    found.mul(part(weight, 1)).sum().backward()
    pairs = [
        (found, part(wanted, 1)),
        *((mine.grad, part(all_.grad, 2)) for mine, all_ in zip(parts, inputs, strict=True)),
    ]
    return [(mine - theirs).abs().max().item() for mine, theirs in pairs]


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (9, 3), (4, 1), (3, 3)])
def test_parts_attend_as_whole_rows_do(gang: Gang, heads: int, key_heads: int) -> None:
    assert max(max(each) for each in gang.run(2, _deviations, heads, key_heads)) < 5e-6


def test_heads_are_spread_evenly_and_keys_go_where_they_are_read() -> None:
    assert shares(8, 4, 2) == (Share(range(4), range(2)), Share(range(4, 8), range(2, 4)))
    assert shares(9, 3, 2) == (Share(range(4), range(2)), Share(range(4, 9), range(1, 3)))
    assert shares(4, 1, 2) == (Share(range(2), range(1)), Share(range(2, 4), range(1)))


class _Group:
    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = lambda: size, lambda: rank


def test_a_target_at_a_border_belongs_to_the_part_of_its_input() -> None:
    wanted = torch.tensor([[11, 12, 13, 14]])  # of rows of 5 tokens
    first, second = (Context(_Group(2, rank)).targets(wanted).tolist() for rank in range(2))  # type: ignore[arg-type]
    assert (first, second) == ([[11, 12, 13]], [[14, -100, -100]])


def test_padding_is_an_example_of_its_own() -> None:
    padded = Context(_Group(4, 0)).padded(torch.tensor([[0, 1, 0, 1, 2]]))  # type: ignore[arg-type]
    assert attention.example_lengths(padded) == [2, 3, 3]


def test_more_ranks_than_heads_and_windows_are_refused() -> None:
    from transformers import LlamaConfig, MistralConfig

    class Model:
        def __init__(self, config: object) -> None:
            self.config = config

    with pytest.raises(ConfigError, match="more than the 2 attention heads"):
        prepare(Model(LlamaConfig(num_attention_heads=4)), _Group(4, 0), tensor=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="sliding_window"):
        prepare(Model(MistralConfig(sliding_window=64)), _Group(2, 0), tensor=1)  # type: ignore[arg-type]


def test_the_flash_kernel_is_told_the_same_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel needs a GPU; here stands a loop with its arguments' documented meaning."""

    def kernel(query, key, value, starts, _starts, longest, _longest, *, scale, window_size, enable_gqa):  # type: ignore[no-untyped-def]
        assert starts.dtype == torch.int32
        assert longest == int(starts.diff().max())
        assert window_size == (-1, 0)
        assert enable_gqa
        parts = []
        for first, end in pairwise(starts.tolist()):
            one = [part[first:end].transpose(0, 1).float() for part in (query, key, value)]
            parts.append(functional.scaled_dot_product_attention(*one, is_causal=True, scale=scale, enable_gqa=True))
        return torch.cat(parts, dim=1).transpose(0, 1).to(query.dtype)

    monkeypatch.setattr(attention, "varlen_attn", kernel)
    given = [part.detach()[:, :, : POSITIONS.shape[1]].bfloat16() for part in _tensors(4, 2)]
    found, _ = attention.varlen_attention(None, *given, None, position_ids=POSITIONS)
    wanted, _ = attention.packed_attention(None, *given, None, position_ids=POSITIONS)
    torch.testing.assert_close(found, wanted)
