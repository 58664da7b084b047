"""Token lists of unlike length as one rectangle. Pure."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
"""[T]: four bytes a token while it waits, where a Python list has 36."""


def padded(
    rows: Sequence[TokenIds], *, filler: int, side: Literal["left", "right"] = "right"
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`rows` as [N, longest] int64 filled up at `side`, and the mask of the same shape: 1 where a token is real."""
    longest = max(map(len, rows), default=0)
    ids = np.full((len(rows), longest), filler, dtype=np.int64)
    mask = np.zeros_like(ids)
    for place, row in enumerate(rows):
        where = slice(longest - len(row), longest) if side == "left" else slice(len(row))
        ids[place, where] = row
        mask[place, where] = 1
    return ids, mask
