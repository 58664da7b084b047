"""Attention by example equals attention under transformers' packed mask, for every row of a batch."""

from pathlib import Path

import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from actors.training.attention import PACKED, example_lengths, implementation
from actors.training.batching import MicroBatch


def test_an_example_begins_where_positions_do_not_go_on() -> None:
    assert example_lengths(torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 0]])) == [3, 2, 1, 4, 1, 1]


def test_a_row_is_never_continued_in_the_next() -> None:
    assert example_lengths(torch.tensor([[0, 1], [2, 3]])) == [2, 2]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_hidden_states_are_those_of_the_mask(
    tiny_base: Path, rows: pa.Table, dtype: torch.dtype, tolerance: float
) -> None:
    batch = MicroBatch.from_arrow(rows)
    masked, ours = (
        AutoModelForCausalLM.from_pretrained(tiny_base, dtype=dtype, attn_implementation=name).get_decoder()(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
        )[0]
        for name in ("sdpa", PACKED)
    )
    torch.testing.assert_close(ours, masked, rtol=tolerance, atol=tolerance)


def test_models_that_need_another_mask_keep_torchs() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert implementation(LlamaConfig(), cpu) == PACKED
    assert implementation(LlamaConfig(), cuda) == "sdpa"
    assert implementation(MistralConfig(sliding_window=4096), cpu) == "sdpa"
