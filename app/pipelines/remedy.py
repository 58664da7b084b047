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
    gives_up: bool = False
    """Whether it changes what is learned, and not only how."""


_KNOBS: Final = (
    Knob(("optimizer.micro_batch_size=1",), 1.05, lambda recipe: recipe.optimizer.micro_batch_size > 1),
    Knob(
        ("parallel.strategy=fsdp",),
        1.2,
        lambda recipe: recipe.parallel.strategy == "ddp" and recipe.parallel.workers.max > 1,
    ),
    Knob(("parallel.strategy=fsdp", "parallel.replicate=1"), 1.2, lambda recipe: recipe.parallel.strategy == "hsdp"),
    Knob(
        ("parallel.strategy=zero3",),
        1.3,
        lambda recipe: recipe.parallel.strategy in ("zero1", "zero2") and recipe.parallel.workers.max > 1,
    ),
    Knob(("precision=bf16",), 1.25, lambda recipe: recipe.precision == "fp32"),
    Knob(("activation_checkpointing=true",), 1.35, lambda recipe: not recipe.activation_checkpointing),
    Knob(("adapter.kind=lora",), 3.0, lambda recipe: recipe.adapter.kind == "none", gives_up=True),
)
_MOST_WORKERS: Final = 1024
_SHORTER: Final = 2.0
"""Half the length is half the context that the model learns from: time saved, but not what was asked for."""


def knobs(recipe: Recipe) -> Iterator[Knob]:
    """What can be turned in this recipe."""
    yield from (knob for knob in _KNOBS if knob.applies(recipe))
    length, cost = recipe.data.max_length, _SHORTER
    while (length := length // 2) >= 128:
        yield Knob((f"data.max_length={length}",), cost, lambda _: True, gives_up=True)
        cost *= _SHORTER


def cheapest(
    recipe: Recipe,
    change: Callable[[tuple[str, ...]], Recipe | None],
    fits: Callable[[Recipe], bool],
    *,
    give_up: bool = True,
) -> tuple[str, ...] | None:
    """The assignments of the cheapest set of knobs with which `fits` holds; None if none does.

    `change` gives the recipe with assignments applied, or None if it would not be valid. Without `give_up`, what is
    learned stays what it is.
    """
    turned = [knob for knob in knobs(recipe) if give_up or not knob.gives_up]
    sets = [chosen for count in (1, 2, 3, 4) for chosen in combinations(turned, count)]
    for chosen in sorted(sets, key=lambda several: (prod(knob.cost for knob in several), len(several))):
        assignments = tuple(assignment for knob in chosen for assignment in knob.assignments)
        if len({assignment.partition("=")[0] for assignment in assignments}) < len(assignments):
            continue  # one setting turned twice
        changed = change(assignments)
        if changed is not None and fits(changed):
            return assignments
    return None


def fewest_workers(
    recipe: Recipe,
    change: Callable[[tuple[str, ...]], Recipe | None],
    fits: Callable[[Recipe], bool],
    *,
    give_up: bool = False,
) -> tuple[str, ...] | None:
    """The assignments with which `fits` holds on the fewest workers, doubled again and again; None if none does.

    The global batch grows where it has too few rows for so many. `change` and `give_up` as in `cheapest`.
    """
    workers = recipe.parallel.workers.max
    while (workers := 2 * workers) <= _MOST_WORKERS:
        sizes: tuple[str, ...] = (f"parallel.workers.min={workers}", f"parallel.workers.max={workers}")
        share = workers // recipe.parallel.ranks_per_replica * recipe.optimizer.micro_batch_size
        grown = -(-recipe.optimizer.global_batch_size // share) * share
        if grown != recipe.optimizer.global_batch_size:
            sizes = (*sizes, f"optimizer.global_batch_size={grown}")
        wider = change(sizes)
        if wider is None:
            continue

        def changed(more: tuple[str, ...], sizes: tuple[str, ...] = sizes) -> Recipe | None:
            return change((*sizes, *more))

        turned = () if fits(wider) else cheapest(wider, changed, fits, give_up=give_up)
        if turned is not None:
            return (*sizes, *turned)
    return None


def gives_up(recipe: Recipe, assignments: tuple[str, ...]) -> bool:
    """Whether these, which `cheapest` found, change what is learned."""
    return any(knob.gives_up and set(knob.assignments) <= set(assignments) for knob in knobs(recipe))
