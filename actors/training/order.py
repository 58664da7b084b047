"""Which row of the training split stands at which position of a run: a function of the seed and nothing else.

A position counts the rows of a whole run, over all its epochs, from 0. Rows are shuffled in two stages, so that
data of any size is read in order of its chunks and within a bounded memory, and so that any position is found
without reading what comes before it:

    1. The split is cut into chunks of `chunk_rows` consecutive rows, and each epoch has its own order of chunks.
    2. `window_chunks` chunks in that order make a window, and the rows of a window are mixed with each other.

A row of a packed token version is a whole sequence: examples were packed once, when the version was made. So a
position in rows is a position in examples too, and a run that goes on does not have to pack again to find it.

Only what NumPy promises never to change is used (`SeedSequence` and the raw stream of PCG64, NEP 19), so that a run
goes on in its own order under another NumPy. This module knows neither torch nor Ray.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from actors.data.version import ROWS_PER_GROUP
from actors.training.steps import StepPlan

Rows = npt.NDArray[np.int64]

WINDOW_CHUNKS = 8


class Piece(NamedTuple):
    """Consecutive positions whose rows lie in one window: `rows[i]` stands at `position + i`."""

    position: int
    rows: Rows


@dataclass(frozen=True)
class Order:
    """The order of `rows` rows, of which each epoch uses the first `epoch_rows` of its own order."""

    rows: int
    epoch_rows: int
    seed: int
    shuffle: bool = True
    chunk_rows: int = ROWS_PER_GROUP
    window_chunks: int = WINDOW_CHUNKS

    @classmethod
    def of(cls, plan: StepPlan, *, seed: int, shuffle: bool) -> "Order":
        """The order of a run. The rows that fill no global batch are left out of an epoch: others in each epoch."""
        return cls(rows=plan.rows, epoch_rows=plan.rows_per_epoch, seed=seed, shuffle=shuffle)

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """The positions from `begin` to before `end`, window by window."""
        while begin < end:
            epoch, first = divmod(begin, self.epoch_rows)
            _, starts = _chunks(self, epoch)
            window = int(np.searchsorted(starts, first, side="right")) - 1
            last = min(int(starts[window + 1]), self.epoch_rows, first + end - begin)
            inside = slice(first - int(starts[window]), last - int(starts[window]))
            yield Piece(begin, _in_order(self, epoch, window)[inside])
            begin += last - first

    def rows_at(self, begin: int, end: int) -> Rows:
        """The row at each position from `begin` to before `end`."""
        return np.concatenate([np.empty(0, np.int64), *(piece.rows for piece in self.pieces(begin, end))])


@lru_cache(maxsize=4)
def _chunks(order: Order, epoch: int) -> tuple[Rows, Rows]:
    """The chunks in this epoch's order; where each window starts in it, and where the last one ends."""
    chunks = np.arange(-(-order.rows // order.chunk_rows), dtype=np.int64)
    if order.shuffle:
        chunks = chunks[_mixed(order, len(chunks), epoch, 0)]
    # All chunks are of one size but the split's last one, which may stand anywhere.
    sizes = np.minimum((chunks + 1) * order.chunk_rows, order.rows) - chunks * order.chunk_rows
    ends = np.append(0, np.cumsum(sizes))
    return chunks, np.append(ends[: -1 : order.window_chunks], order.rows)


@lru_cache(maxsize=4)
def _in_order(order: Order, epoch: int, window: int) -> Rows:
    chunks, _ = _chunks(order, epoch)
    own = chunks[window * order.window_chunks : (window + 1) * order.window_chunks]
    spans = [np.arange(c * order.chunk_rows, min((c + 1) * order.chunk_rows, order.rows), dtype=np.int64) for c in own]
    rows = np.concatenate(spans)
    return rows[_mixed(order, len(rows), epoch, 1 + window)] if order.shuffle else rows


def _mixed(order: Order, count: int, epoch: int, which: int) -> npt.NDArray[np.intp]:
    """A permutation of `count` for one epoch and one use; 64 random bits each, so a tie is as good as impossible."""
    seed = np.random.SeedSequence((order.seed % 2**64, epoch, which))
    return np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable")
