"""What is taken for a hard negative, and what is left alone because it may be right."""

import numpy as np
import numpy.typing as npt
import pytest

from actors.data.config import NegativesConfig
from actors.evaluation.negatives import chosen

# By angle from the query: the positive, its near copy, one that is nearly as near as the positive, two that are not.
ANGLES = [20.0, 21.0, -20.5, -35.0, 50.0, 120.0]
QUERY = 0.0


def at(*degrees: float) -> npt.NDArray[np.float32]:
    turned = np.radians(degrees)
    return np.stack([np.cos(turned), np.sin(turned)], axis=1).astype(np.float32)


@pytest.mark.parametrize(
    ("settings", "right", "places"),
    [
        ({}, [0], [3, 4]),
        ({"margin": 0.0}, [0], [2, 3]),
        ({"margin": 0.0, "most_alike": 1.0}, [0], [2, 1]),
        ({"margin": 0.3}, [0], [4, 5]),
        ({"per_query": 1}, [0], [3]),
        ({}, [0, 3], [4, 5]),
        ({"candidates": 4}, [0], [3]),
        ({"candidates": 2}, [0], []),
    ],
    ids=["defaults", "no margin", "nothing guarded", "wide margin", "one", "two answers", "few looked at", "none left"],
)
def test_the_nearest_that_are_surely_wrong_are_chosen(
    settings: dict[str, float], right: list[int], places: list[int]
) -> None:
    config = NegativesConfig.model_validate(settings)
    assert chosen(config, at(QUERY), at(*ANGLES), [right]) == [places]


def test_each_query_is_judged_by_its_own_positive() -> None:
    config = NegativesConfig(per_query=1, candidates=3)
    found = chosen(config, np.repeat(at(0.0, 90.0), 400, axis=0), at(5.0, 95.0, 60.0), [[0]] * 400 + [[1]] * 400)
    assert found == [[2]] * 800


def test_a_positive_behind_the_query_leaves_room_for_what_is_farther_still() -> None:
    """Where the cosine is below zero the margin still asks for less, not for more."""
    assert chosen(NegativesConfig(), at(0.0), at(100.0, 102.0, 179.0), [[0]]) == [[2]]
