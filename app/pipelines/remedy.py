"""The cheapest change that makes a model fit: every knob that saves memory, with what it costs, and a search.

Costs are factors on the time of a step, from our own benches where there is one (docs/training.md); they order the
knobs, they do not predict.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Final

from app.recipe import Recipe


@dataclass(frozen=True)
class Knob:
    """One setting turned: `--set` assignments, and how much longer a step takes or how much is given up."""

    assignments: tuple[str, ...]
    cost: float
    applies: Callable[[Recipe], bool]


_KNOBS: Final = (
    Knob(("optimizer.micro_batch_size=1",), 1.05, lambda recipe: recipe.optimizer.micro_batch_size > 1),
    Knob(
        ("parallel.strategy=fsdp",),
        1.2,
        lambda recipe: recipe.parallel.strategy == "ddp" and recipe.parallel.workers.max > 1,
    ),
    Knob(("precision=bf16",), 1.25, lambda recipe: recipe.precision == "fp32"),
    Knob(("activation_checkpointing=true",), 1.35, lambda recipe: not recipe.activation_checkpointing),
    Knob(("adapter.kind=lora",), 3.0, lambda recipe: recipe.adapter.kind == "none"),
)
_SHORTER: Final = 2.0
"""Half the length is half the context that the model learns from: time saved, but not what was asked for."""


def knobs(recipe: Recipe) -> Iterator[Knob]:
    """What can be turned in this recipe."""
    yield from (knob for knob in _KNOBS if knob.applies(recipe))
    length, cost = recipe.data.max_length, _SHORTER
    while (length := length // 2) >= 128:
        yield Knob((f"data.max_length={length}",), cost, lambda _: True)
        cost *= _SHORTER


def cheapest(
    recipe: Recipe, change: Callable[[tuple[str, ...]], Recipe | None], fits: Callable[[Recipe], bool]
) -> tuple[str, ...] | None:
    """The assignments of the cheapest set of knobs with which `fits` holds; None if none does.

    `change` gives the recipe with assignments applied, or None if it would not be valid.
    """
    turned = list(knobs(recipe))
    sets = [chosen for count in (1, 2, 3, 4) for chosen in combinations(turned, count)]
    for chosen in sorted(sets, key=lambda several: (prod(knob.cost for knob in several), len(several))):
        assignments = tuple(assignment for knob in chosen for assignment in knob.assignments)
        if len({assignment.partition("=")[0] for assignment in assignments}) < len(assignments):
            continue  # one setting turned twice
        changed = change(assignments)
        if changed is not None and fits(changed):
            return assignments
    return None
