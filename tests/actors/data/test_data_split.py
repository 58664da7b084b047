"""The split: no group and no near copy on both sides, whatever the sizes."""

import random
import time
from collections import Counter

import pytest

from actors.data.split import Item, divide, hold_out, near_duplicates
from cluster.errors import ConfigError


def _items(sizes: list[int]) -> list[Item]:
    return [
        Item(f"{group}-{row}", f"group{group}", f"alpha{group} beta{row} gamma{group * row} delta")
        for group, size in enumerate(sizes)
        for row in range(size)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_groups_stay_whole_and_the_fraction_is_near_whatever_the_skew(seed: int) -> None:
    sizes = [int(2000 / rank) for rank in range(1, 120)]  # Zipf: the first group alone has a fifth
    items = _items(sizes)
    division = divide(items, test_fraction=0.2, similarity=0.8, seed=seed)
    train, test = ({items[place].group for place in side} for side in (division.train, division.test))
    assert not train & test
    assert len(division.test) / len(items) == pytest.approx(0.2, abs=0.01)
    largest = Counter(items[place].group for place in division.test).most_common(1)[0][1]
    assert largest <= len(items) * 0.2 / 4
    assert sorted(division.train + division.test) == list(range(len(items)))


def test_the_split_depends_on_the_seed_and_on_nothing_else() -> None:
    items = _items([7] * 50)
    shuffled = random.Random(1).sample(items, len(items))
    one, other = (divide(given, test_fraction=0.3, similarity=0.8, seed=0) for given in (items, shuffled))
    assert [items[place].id for place in one.train] == [shuffled[place].id for place in other.train]
    assert [items[place].id for place in one.test] == [shuffled[place].id for place in other.test]
    assert divide(items, test_fraction=0.3, similarity=0.8, seed=1).test != one.test


def test_any_prefix_is_a_sample_of_all_groups() -> None:
    items = _items([100] * 20)
    division = divide(items, test_fraction=0.25, similarity=0.8, seed=0)
    assert len({items[place].group for place in division.train[:150]}) == 15


def test_another_group_changes_the_side_of_few() -> None:
    sizes = {f"group{number}": 10 + number % 7 for number in range(200)}
    before = hold_out(sizes, 0.2, seed=0)
    after = hold_out({**sizes, "new": 12}, 0.2, seed=0)
    assert len(before ^ after) <= 6


def test_one_group_cannot_be_split_and_two_can() -> None:
    with pytest.raises(ConfigError, match="one group"):
        divide(_items([5]), test_fraction=0.2, similarity=0.8, seed=0)
    with pytest.raises(ConfigError, match="one usable row only"):
        divide(_items([1]), test_fraction=0.2, similarity=0.8, seed=0)
    assert hold_out({"big": 90, "small": 80}, 0.2, seed=0) == {"small"}


def test_of_equal_rows_one_stays_and_the_sides_of_the_source_are_kept() -> None:
    items = [
        Item("a", "1", "one two three four", "test"),
        Item("b", "2", "five six seven eight", "train"),
        Item("a", "3", "one two three four", "train"),
        Item("c", "4", "nine ten eleven twelve", "test"),
        Item("b", "5", "five six seven eight", "train"),
    ]
    division = divide(items, test_fraction=0.2, similarity=0.8, seed=0)
    assert (set(division.train), division.test) == ({1, 2}, [3])
    assert division.dropped == {"exact-duplicate": 2, "near-duplicate-of-train": 0}


def test_near_copies_of_training_texts_leave_the_test_side() -> None:
    sentence = "the quick brown fox jumps over the lazy dog while seven tall wizards watch it from afar"
    items = [Item(f"t{n}", f"g{n}", f"{n} entirely other words stand in text {n}", "train") for n in range(20)]
    items += [
        Item("original", "x", sentence, "train"),
        Item("near", "y", sentence.upper().replace("AFAR", "NEARBY"), "test"),
        Item("far", "z", "seven tall wizards watch the dog", "test"),
    ]
    division = divide(items, test_fraction=0.2, similarity=0.8, seed=0)
    assert [items[place].id for place in division.test] == ["far"]
    assert division.dropped["near-duplicate-of-train"] == 1


def _jaccard(one: str, other: str) -> float:
    def shingles(text: str) -> set[tuple[str, ...]]:
        words = text.split()
        return {tuple(words[n : n + 3]) for n in range(max(1, len(words) - 2))}

    a, b = shingles(one), shingles(other)
    return len(a & b) / len(a | b)


@pytest.mark.parametrize("similarity", [0.3, 0.5, 0.8, 1.0])
def test_near_duplicates_are_exactly_those_that_comparing_all_pairs_finds(similarity: float) -> None:
    chance = random.Random(0)
    words = [f"w{number}" for number in range(30)]
    train = [" ".join(chance.choices(words, k=chance.randint(1, 15))) for _ in range(150)]
    test = []
    for text in chance.choices(train, k=150):
        changed = text.split()
        for _ in range(chance.randint(0, 3)):
            changed[chance.randrange(len(changed))] = chance.choice(words)
        test.append(" ".join(changed))
    expected = {n for n, text in enumerate(test) if any(_jaccard(text, other) >= similarity for other in train)}
    assert near_duplicates(train, test, similarity) == expected
    assert 0 < len(expected) < 150


def test_texts_without_words_are_near_to_nothing() -> None:
    assert near_duplicates(["", "!!"], ["", "!!", "word"], 0.8) == set()


def test_fifty_thousand_texts_take_seconds() -> None:
    # A tenth of it here: the work grows in proportion.
    chance = random.Random(0)
    texts = [" ".join(f"w{int(chance.paretovariate(0.7))}" for _ in range(60)) for _ in range(5000)]
    started = time.process_time()
    near_duplicates(texts[:4000], texts[4000:], 0.8)
    assert time.process_time() - started < 3
