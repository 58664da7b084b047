"""Which examples share a training sequence, and what the sequence then holds.

Pure: lengths and tokens in, plans and arrays out. Does not know chat, tokenizers, Ray or storage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.data.rows import rank

NO_LOSS = -100
"""The label that PyTorch's cross entropy ignores."""

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class TokenizedExample:
    """Token ids of one example and, for each, whether the model learns to say it."""

    id: str
    input_ids: Sequence[int]
    loss_mask: Sequence[bool]


@dataclass(frozen=True)
class PackedSequence:
    """One training row: each array [max_length] int32; padding has label -100."""

    input_ids: Ints
    labels: Ints
    position_ids: Ints
    sample_ids: list[str]


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Positions of `lengths` in as few bins of `capacity` as best fit decreasing finds; each exactly once.

    Longest first, each into the fullest bin that still has room (Johnson 1974: at most 11/9 of the optimum).
    The room of open bins is kept as a bit set, so finding that bin is one shift and one lowest bit.
    """
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    rooms = 0
    for position in sorted(range(len(lengths)), key=lambda position: (-lengths[position], position)):
        length = lengths[position]
        if not 0 < length <= capacity:
            raise ValueError(f"length {length} of example {position} is not in 1..{capacity}")
        fitting = rooms >> length
        if fitting:
            room = (fitting & -fitting).bit_length() - 1 + length
            target = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, target = capacity, len(bins)
            bins.append([])
        bins[target].append(position)
        with_room.setdefault(room - length, []).append(target)
        rooms |= 1 << (room - length)
    return bins


def arrange(examples: Sequence[TokenizedExample], max_length: int, *, packing: bool, seed: int) -> list[list[int]]:
    """Which examples (by position) make each sequence, in training order.

    Packing puts the longest examples into the first bins, so the bins are put into the order of a hash; without
    packing the examples keep their own order, which is one already.
    """
    if not packing:
        return [[position] for position in range(len(examples))]
    bins = pack([len(example.input_ids) for example in examples], max_length)
    return sorted(bins, key=lambda members: rank(seed, examples[members[0]].id))


def collate(examples: Sequence[TokenizedExample], max_length: int, pad_id: int) -> PackedSequence:
    """Put `examples` one after another and pad to `max_length`; positions count from 0 in each example.

    The first label of each example is -100: a causal model would predict it from the example before. Padding
    counts positions from 0 as well, so that attention by positions sees it as an example of its own.
    """
    input_ids = np.full(max_length, pad_id, dtype=np.int32)
    labels = np.full(max_length, NO_LOSS, dtype=np.int32)
    position_ids = np.zeros(max_length, dtype=np.int32)
    start = 0
    for example in examples:
        end = start + len(example.input_ids)
        if end > max_length:
            raise ValueError(f"{end} tokens do not fit into {max_length}")
        input_ids[start:end] = example.input_ids
        learned = np.asarray(example.loss_mask, dtype=bool)
        labels[start:end] = np.where(learned, input_ids[start:end], NO_LOSS)
        labels[start] = NO_LOSS
        position_ids[start:end] = np.arange(end - start)
        start = end
    position_ids[start:] = np.arange(max_length - start)
    return PackedSequence(input_ids, labels, position_ids, [example.id for example in examples])
