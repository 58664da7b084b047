"""The grouped LoRA products against one token at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.engine_plugin.grouped import expand, group, shrink

SLOTS = 3


def token_by_token(x: torch.Tensor, weights: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """[tokens, out]: each token through its own adapter's matrix; zeros for a token without one."""
    rows = [
        torch.zeros(weights.shape[-2]) if slot < 0 else weights[slot, 0] @ row
        for slot, row in zip(slots, x, strict=True)
    ]
    return torch.stack(rows)


@settings(max_examples=40, deadline=None)
@given(
    slots=st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=9),
    rank=st.sampled_from([1, 4, 16]),
    scale=st.sampled_from([1.0, 0.3, 2.0]),
    seed=st.integers(0, 5),
)
def test_shrink_then_expand_into_slices_is_each_tokens_own_adapter(
    slots: list[int], rank: int, scale: float, seed: int
) -> None:
    """Two output slices as in a fused gate/up projection, on top of what the base put there."""
    torch.manual_seed(seed)
    tokens, features, widths = len(slots), 8, (6, 10)
    x = torch.randn(tokens, features)
    down = [torch.randn(SLOTS, 1, rank, features) for _ in widths]
    up = [torch.randn(SLOTS, 1, width, rank) for width in widths]
    base = torch.randn(tokens, sum(widths))
    out, groups = base.clone(), group(torch.tensor(slots))
    offset = 0
    for a, b, width in zip(down, up, widths, strict=True):
        inner = torch.full((tokens, rank), 99.0)  # whatever a reused buffer holds
        shrink(x, a, inner, groups, scale)
        torch.testing.assert_close(inner, token_by_token(x, a, slots) * scale)
        expand(inner, b, out, groups, offset=offset, width=width)
        wanted = base[:, offset : offset + width] + token_by_token(inner, b, slots)
        torch.testing.assert_close(out[:, offset : offset + width], wanted)
        offset += width
    for token, slot in enumerate(slots):
        if slot < 0:
            assert torch.equal(out[token], base[token])


def test_without_add_the_adapters_rows_are_replaced_and_the_others_left() -> None:
    weights, out = torch.ones(2, 4, 3), torch.full((3, 4), 7.0)
    expand(torch.ones(3, 3), weights, out, group(torch.tensor([0, -1, 1])), add=False)
    assert out.tolist() == [[3.0] * 4, [7.0] * 4, [3.0] * 4]


def test_padding_of_weights_beyond_the_output_is_cut_off() -> None:
    """The vocabulary of an adapter may be padded further than the model's."""
    out = torch.zeros(1, 4)
    expand(torch.ones(1, 2), torch.ones(1, 1, 6, 2), out, group(torch.tensor([0])))
    assert out.tolist() == [[2.0] * 4]


@pytest.mark.parametrize(("slots", "found"), [([-1, -1], []), ([1, 1], [1]), ([0, -1, 2], [0, 2])])
def test_a_token_without_an_adapter_is_in_no_group(slots: list[int], found: list[int]) -> None:
    assert [member.slot for member in group(torch.tensor(slots))] == found


def test_in_bfloat16_the_result_is_as_near_as_its_rounding() -> None:
    torch.manual_seed(0)
    slots = [0, -1, 2, 1, -1, 0]
    x, weights = torch.randn(6, 64).bfloat16(), torch.randn(SLOTS, 1, 16, 64).bfloat16()
    inner = torch.zeros(6, 16)
    shrink(x, weights, inner, group(torch.tensor(slots)), 2.0)
    torch.testing.assert_close(inner, token_by_token(x.float(), weights.float(), slots) * 2.0, rtol=1e-2, atol=1e-1)
