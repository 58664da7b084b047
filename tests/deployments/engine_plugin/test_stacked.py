"""All adapters of a batch in one product, against one token at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.engine_plugin.stacked import expand, mix, shrink, spread

SLOTS = 6


def token_by_token(x: torch.Tensor, weights: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """[tokens, out]: each token through its own adapter's matrix; zeros for a token without one."""
    rows = [
        torch.zeros(weights.shape[-2]) if slot < 0 else weights[slot, 0] @ row
        for slot, row in zip(slots, x, strict=True)
    ]
    return torch.stack(rows)


@settings(max_examples=60, deadline=None)
@given(
    slots=st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=9).filter(lambda slots: max(slots) >= 0),
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
    out, mixed = base.clone(), mix(torch.tensor(slots))
    assert mixed is not None
    offset = 0
    for a, b, width in zip(down, up, widths, strict=True):
        inner = shrink(x, a, mixed, scale)
        own = inner.sum(1)
        torch.testing.assert_close(own, token_by_token(x, a, slots) * scale)
        torch.testing.assert_close(spread(own, mixed), inner)
        expand(inner, b, mixed, out, offset=offset, width=width)
        wanted = base[:, offset : offset + width] + token_by_token(own, b, slots)
        torch.testing.assert_close(out[:, offset : offset + width], wanted)
        offset += width
    for token, slot in enumerate(slots):
        if slot < 0:
            assert torch.equal(out[token], base[token])


def test_what_an_adapter_overflows_into_is_its_own() -> None:
    """Its A may give infinity for some token of another; the other's answer knows nothing of it."""
    x, down = torch.full((2, 4), 2.0), torch.ones(2, 1, 1, 4)
    down[1] = torch.finfo(torch.float32).max
    mixed = mix(torch.tensor([0, 1]))
    assert mixed is not None
    out = torch.zeros(2, 3)
    expand(shrink(x, down, mixed), torch.ones(2, 1, 3, 1), mixed, out)
    assert out[0].tolist() == [8.0] * 3
    assert out[1].isinf().all()


def test_stacked_weights_are_laid_out_anew_once_and_written_into_as_before() -> None:
    weights = torch.randn(2, 1, 5, 3)
    copy, mixed = weights.clone(), mix(torch.tensor([0, 1]))
    assert mixed is not None
    with torch.inference_mode():  # as an engine computes; it loads outside of it
        expand(torch.ones(2, 2, 3), weights, mixed, torch.zeros(2, 5))
    assert torch.equal(weights, copy)
    assert weights.shape == copy.shape
    place = weights.data_ptr()
    weights[1, 0, :5, :3].copy_(torch.full((5, 3), 7.0))  # as vLLM brings an adapter in
    out = torch.zeros(2, 5)
    expand(spread(torch.ones(2, 3), mixed), weights, mixed, out)
    assert weights.data_ptr() == place
    torch.testing.assert_close(out, torch.stack([copy[0, 0].sum(1), torch.full((5,), 21.0)]))


def test_padding_of_weights_beyond_the_output_is_cut_off() -> None:
    """The vocabulary of an adapter may be padded further than the model's."""
    out, mixed = torch.zeros(1, 4), mix(torch.tensor([0]))
    assert mixed is not None
    expand(torch.ones(1, 1, 2), torch.ones(1, 1, 6, 2), mixed, out)
    assert out.tolist() == [[2.0] * 4]


def test_a_batch_without_adapters_has_no_products() -> None:
    assert mix(torch.tensor([-1, -1])) is None


@pytest.mark.parametrize(
    ("slots", "taken"), [([1, 1], slice(1, 2)), ([0, -1, 2], slice(0, 3)), ([5, 0], [0, 5])], ids=str
)
def test_slots_that_lie_near_each_other_are_a_range_and_need_no_copy(slots: list[int], taken: object) -> None:
    mixed = mix(torch.tensor(slots))
    assert mixed is not None
    assert (mixed.slots if isinstance(mixed.slots, slice) else mixed.slots.tolist()) == taken


def test_in_bfloat16_the_result_is_as_near_as_its_rounding() -> None:
    torch.manual_seed(0)
    slots = [0, -1, 2, 1, -1, 0]
    x, weights = torch.randn(6, 64).bfloat16(), torch.randn(SLOTS, 1, 16, 64).bfloat16()
    mixed = mix(torch.tensor(slots))
    assert mixed is not None
    inner = shrink(x, weights, mixed, 2.0).sum(1).float()
    torch.testing.assert_close(inner, token_by_token(x.float(), weights.float(), slots) * 2.0, rtol=1e-2, atol=1e-1)
