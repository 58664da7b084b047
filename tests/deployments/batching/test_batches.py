"""Which texts go together: by likeness of length, within a budget, and nobody waits for ever."""

import random

from deployments.batching.batches import MIN_FILL, choose, padded_tokens


def drain(lengths: list[int], budget: int) -> list[list[int]]:
    """All batches, as lists of positions in `lengths`."""
    waiting = list(range(len(lengths)))
    made = []
    while waiting:
        chosen = choose([lengths[position] for position in waiting], budget)
        made.append([waiting[index] for index in chosen])
        waiting = [position for position in waiting if position not in made[-1]]
    return made


def test_nothing_waits_nothing_is_chosen() -> None:
    assert choose([], 100) == []


def test_equal_lengths_fill_the_budget() -> None:
    assert choose([10] * 7, 50) == [0, 1, 2, 3, 4]


def test_the_first_goes_with_its_like_shortest_first() -> None:
    assert choose([10, 100, 9, 11, 99], 1000) == [2, 0, 3]


def test_neighbours_join_nearest_first() -> None:
    # Budget for two rows of 12: the one of 11 is nearer than the one of 8.
    assert choose([10, 8, 11], 24) == [0, 2]


def test_a_text_over_the_budget_goes_alone_and_others_are_not_kept_waiting() -> None:
    lengths = [5000, 10, 10, 10]
    assert choose(lengths, 100) == [0]
    assert drain(lengths, 100) == [[0], [1, 2, 3]]


def test_every_text_goes_exactly_once_within_budget_and_well_filled() -> None:
    rng = random.Random(0)
    for _ in range(50):
        lengths = [rng.choice([3, rng.randint(1, 60), rng.randint(1, 600)]) for _ in range(rng.randint(1, 80))]
        budget = rng.randint(50, 2000)
        batches = drain(lengths, budget)
        assert sorted(position for batch in batches for position in batch) == list(range(len(lengths)))
        for batch in batches:
            sizes = [lengths[position] for position in batch]
            assert len(batch) == 1 or padded_tokens(sizes) <= budget
            assert min(sizes) >= MIN_FILL * max(sizes)
            assert sizes == sorted(sizes)


def test_whose_turn_it_is_goes_whatever_its_length() -> None:
    rng = random.Random(1)
    for _ in range(200):
        lengths = [rng.randint(1, 300) for _ in range(rng.randint(1, 40))]
        first = rng.randrange(len(lengths))
        assert first in choose(lengths, rng.randint(1, 1000), first)


def test_many_texts_cost_little_padding() -> None:
    rng = random.Random(2)
    lengths = [rng.randint(16, 256) for _ in range(2000)]
    spent = sum(padded_tokens([lengths[position] for position in batch]) for batch in drain(lengths, 2048))
    assert spent < 1.05 * sum(lengths)
