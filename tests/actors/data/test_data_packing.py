"""Packing: every example once, nothing cut, nothing learned from a neighbour."""

import random

import numpy as np
import pytest

from actors.data.packing import NO_LOSS, TokenizedExample, arrange, collate, pack


@pytest.mark.parametrize("seed", range(5))
def test_every_example_is_packed_once_and_no_bin_overflows(seed: int) -> None:
    lengths = random.Random(seed).choices(range(1, 513), k=2000)
    bins = pack(lengths, 512)
    assert sorted(place for members in bins for place in members) == list(range(2000))
    assert max(sum(lengths[place] for place in members) for members in bins) <= 512
    assert len(bins) <= sum(lengths) / 512 * 1.03


def test_an_example_goes_into_the_fullest_bin_that_has_room() -> None:
    # 7 and 6 open a bin each; 3 fits both and goes where it leaves nothing; 4 closes the other.
    assert pack([6, 7, 3, 4], 10) == [[1, 2], [0, 3]]


def test_best_fit_equals_the_slow_search() -> None:
    lengths = random.Random(3).choices(range(1, 60), k=300)
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [number for number, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda number: rooms[number])] -= length
        else:
            rooms.append(100 - length)
    bins = pack(lengths, 100)
    assert sorted(100 - sum(lengths[place] for place in members) for members in bins) == sorted(rooms)


@pytest.mark.parametrize("length", [0, 11])
def test_a_length_that_cannot_be_packed_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"length {length} of example 1"):
        pack([5, length], 10)


def _example(name: str, tokens: int, learned: int) -> TokenizedExample:
    ids = list(range(1, tokens + 1))
    return TokenizedExample(name, ids, [place >= tokens - learned for place in range(tokens)])


def test_a_packed_sequence_restarts_positions_and_learns_only_the_masked_tokens() -> None:
    packed = collate([_example("a", 4, 2), _example("b", 3, 3)], 9, pad_id=0)
    assert packed.input_ids.tolist() == [1, 2, 3, 4, 1, 2, 3, 0, 0]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1]
    # The first token of b has loss in b's own mask, but would be predicted from a.
    assert packed.labels.tolist() == [NO_LOSS, NO_LOSS, 3, 4, NO_LOSS, 2, 3, NO_LOSS, NO_LOSS]
    assert packed.sample_ids == ["a", "b"]
    assert {packed.input_ids.dtype, packed.labels.dtype, packed.position_ids.dtype} == {np.dtype(np.int32)}


def test_more_than_a_sequence_holds_is_refused_not_cut() -> None:
    with pytest.raises(ValueError, match="8 tokens do not fit into 7"):
        collate([_example("a", 4, 2), _example("b", 4, 2)], 7, pad_id=0)


def test_training_order_is_fixed_and_not_by_length() -> None:
    chance = random.Random(0)
    examples = [_example(str(number), chance.randint(5, 60), 2) for number in range(300)]
    order = arrange(examples, 100, packing=True, seed=0)
    assert order == arrange(examples, 100, packing=True, seed=0)
    assert order != arrange(examples, 100, packing=True, seed=1)
    longest = [max(len(examples[place].input_ids) for place in members) for members in order]
    half = len(longest) // 2
    assert abs(sum(longest[:half]) / half - sum(longest[half:]) / (len(longest) - half)) < 8
    assert arrange(examples, 100, packing=False, seed=0) == [[number] for number in range(300)]
