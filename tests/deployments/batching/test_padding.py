import numpy as np
import pytest

from deployments.batching.padding import padded


@pytest.mark.parametrize(
    ("side", "expected", "real"),
    [
        ("right", [[5, 6, 7], [8, 0, 0]], [[1, 1, 1], [1, 0, 0]]),
        ("left", [[5, 6, 7], [0, 0, 8]], [[1, 1, 1], [0, 0, 1]]),
    ],
)
def test_rows_are_filled_up_and_marked(side: str, expected: list[list[int]], real: list[list[int]]) -> None:
    rows = [np.array([5, 6, 7], dtype=np.int32), np.array([8], dtype=np.int32)]
    ids, mask = padded(rows, filler=0, side=side)  # type: ignore[arg-type]
    assert (ids.tolist(), mask.tolist()) == (expected, real)
    assert ids.dtype == mask.dtype == np.int64


def test_no_rows_and_no_tokens_have_a_shape_too() -> None:
    assert padded([], filler=0)[0].shape == (0, 0)
    assert padded([np.array([], dtype=np.int32)], filler=0)[0].shape == (1, 0)
