"""Which rows learn and which rows test: by group, without a text that stands on both sides.

Pure: ids, groups and texts in, positions out. Does not know shapes, files, Ray or tokenizers.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.data.config import Split
from actors.data.rows import rank
from cluster.errors import ConfigError

SHINGLE_WORDS = 3
_WORD = re.compile(r"\w+")
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio: Knuth's multiplicative hash
_Shingles = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Item:
    """What the split needs of a row. `split` is set where the source has sides of its own."""

    id: str
    group: str
    text: str
    split: Split | None = None


@dataclass(frozen=True)
class Division:
    """Positions of each side in published order (any prefix is a fair sample), and what was left out."""

    train: list[int]
    test: list[int]
    dropped: dict[str, int]


def divide(items: Sequence[Item], *, test_fraction: float, similarity: float, seed: int) -> Division:
    """Split `items`; of equal ids the first stays, and a test row near to a train row goes.

    Raises `ConfigError` if there is only one group, because then nothing can be held out.
    """
    first: dict[str, int] = {}
    # Where the source has sides, its train rows come first, so that the repeat in test is the one that goes.
    for position in sorted(range(len(items)), key=lambda position: items[position].split == "test"):
        first.setdefault(items[position].id, position)
    unique = sorted(first.values())
    free = [position for position in unique if items[position].split is None]
    test_groups: frozenset[str] = frozenset()
    if free:
        test_groups = hold_out(Counter(items[position].group for position in free), test_fraction, seed)
    sides: dict[Split, list[int]] = {"train": [], "test": []}
    for position in unique:
        item = items[position]
        sides[item.split or ("test" if item.group in test_groups else "train")].append(position)
    near = near_duplicates(
        [items[position].text for position in sides["train"]],
        [items[position].text for position in sides["test"]],
        similarity,
    )
    ordered = {
        "train": sides["train"],
        "test": [position for place, position in enumerate(sides["test"]) if place not in near],
    }
    for positions in ordered.values():
        positions.sort(key=lambda position: rank(seed, items[position].id))
    dropped = {"exact-duplicate": len(items) - len(unique), "near-duplicate-of-train": len(near)}
    return Division(ordered["train"], ordered["test"], dropped)


def hold_out(rows_of: Mapping[str, int], fraction: float, seed: int) -> frozenset[str]:
    """The groups that test: about `fraction` of all rows, never more unless every group is larger than that.

    Groups are taken in the order of a hash. A group larger than a quarter of the wanted rows is first passed
    over, because a test set that is one package says little about others. Another group in the data changes
    the side of few.
    """
    if sum(rows_of.values()) == 1:
        raise ConfigError(
            "There is one usable row only, so none can be held out.", hint="Give at least two rows, better hundreds."
        )
    if len(rows_of) < 2:
        raise ConfigError(
            f"All rows belong to one group ({next(iter(rows_of), None)!r}), so none can be held out.",
            hint="Give at least two values in the `group` column, or leave the column out to split by row.",
        )
    wanted = round(fraction * sum(rows_of.values()))
    in_order = sorted(rows_of, key=lambda group: (rank(seed, group), group))
    chosen: set[str] = set()
    taken = 0
    for largest in (wanted // 4, wanted):
        for group in in_order:
            if group not in chosen and rows_of[group] <= min(largest, wanted - taken):
                chosen.add(group)
                taken += rows_of[group]
    return frozenset(chosen or {min(in_order, key=lambda group: rows_of[group])})


def near_duplicates(train: Sequence[str], test: Sequence[str], similarity: float) -> set[int]:
    """Positions in `test` that some text of `train` is near to: Jaccard of word 3-grams ≥ `similarity`.

    Exact, not sampled: two sets so similar share one of the rarest shingles of each (prefix filtering,
    Chaudhuri et al. 2006; Bayardo et al. 2007), so only texts that do are compared. 50,000 functions take
    seconds; the time grows as `similarity` falls. Texts without a word are near to nothing.
    """
    shingles = _rare_first([*train, *test])
    index: dict[int, list[int]] = defaultdict(list)
    for position in range(len(train)):
        for shingle in _prefix(shingles[position], similarity):
            index[shingle].append(position)
    members = [frozenset(ranks) for ranks in shingles]
    near = set()
    for position in range(len(test)):
        ours = members[len(train) + position]
        candidates = {
            other
            for shingle in _prefix(shingles[len(train) + position], similarity)
            for other in index.get(shingle, ())
        }
        if any(_similar(ours, members[other], similarity) for other in candidates):
            near.add(position)
    return near


def _similar(one: frozenset[int], other: frozenset[int], similarity: float) -> bool:
    shorter, longer = sorted((len(one), len(other)))
    if shorter < similarity * longer:
        return False
    shared = len(one & other)
    return shared >= similarity * (shorter + longer - shared)


def _prefix(ranks: Sequence[int], similarity: float) -> Sequence[int]:
    # The small allowance keeps 0.8 * 10 from counting as 8.000000000000002.
    must_share = math.ceil(similarity * len(ranks) - 1e-9)
    return ranks[: len(ranks) - must_share + 1] if ranks else ranks


def _rare_first(texts: Sequence[str]) -> list[list[int]]:
    """Each text's distinct shingles as numbers, the rarest over all texts first."""
    numbers: dict[str, int] = {}
    hashed = [_shingles(text, numbers) for text in texts]
    if not any(len(one) for one in hashed):
        return [[] for _ in texts]
    _, inverse, counts = np.unique(np.concatenate(hashed), return_inverse=True, return_counts=True)
    ranks = np.empty(len(counts), dtype=np.int64)
    ranks[np.argsort(counts, kind="stable")] = np.arange(len(counts))
    ranked = ranks[inverse]
    ends = np.cumsum([len(one) for one in hashed])
    return [np.sort(part).tolist() for part in np.split(ranked, ends[:-1])]


def _shingles(text: str, numbers: dict[str, int]) -> _Shingles:
    words = [numbers.setdefault(word, len(numbers) + 1) for word in _WORD.findall(text.casefold())]
    if not words:
        return np.empty(0, dtype=np.uint64)
    # A text shorter than a shingle is one shingle, filled up with the number of no word.
    words += [0] * (SHINGLE_WORDS - len(words))
    word = np.array(words, dtype=np.uint64)
    mixed = (word[:-2] * _MIX + word[1:-1]) * _MIX + word[2:]
    return np.unique(mixed)
