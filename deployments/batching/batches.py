"""Which waiting texts go through the model together. Pure: lengths in, positions out.

A batch is padded to its longest text, so what it costs is rows × longest: texts of like length go together.
Whose turn it is, the caller says: that text is in the batch however long or short it is, so that nothing
waits for ever.
"""

from collections.abc import Sequence

MIN_FILL = 0.75
"""A text joins a batch only if it is at least this share of the batch's longest: padding is work for nothing."""


def choose(lengths: Sequence[int], budget: int, first: int = 0) -> list[int]:
    """Positions in `lengths` (tokens) of the next batch, shortest first.

    The batch holds the text at position `first`, grows to its neighbours in length, nearest first, and stays
    within `budget` padded tokens; a text that is over the budget by itself goes alone.
    """
    if not lengths:
        return []
    order = sorted(range(len(lengths)), key=lambda position: (lengths[position], position))
    low = high = order.index(first)
    while True:
        shortest, longest = lengths[order[low]], lengths[order[high]]
        rows = high - low + 2
        below = lengths[order[low - 1]] if low > 0 else None
        above = lengths[order[high + 1]] if high + 1 < len(order) else None
        fits_below = below is not None and rows * longest <= budget and below >= MIN_FILL * longest
        fits_above = above is not None and rows * above <= budget and shortest >= MIN_FILL * above
        if fits_above and (not fits_below or above - longest <= shortest - below):  # type: ignore[operator]
            high += 1
        elif fits_below:
            low -= 1
        else:
            return order[low : high + 1]


def padded_tokens(lengths: Sequence[int]) -> int:
    """What a batch of these lengths costs."""
    return len(lengths) * max(lengths, default=0)
