"""Going on with an earlier run, or beginning a new one: never one where the other was meant. Pure.

A run is taken up as it began. What decides its weights must be as it was, to the last setting: the base, the data
version, what learns, the optimizer, the number of steps (the learning rate is a function of it), the seed. What only
decides how and where it is computed may change, and is in `MAY_CHANGE`; so may whatever comes after training.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from actors.registry.facts import RunFact
from actors.registry.views import RunView
from actors.training.config import TrainConfig
from cluster.errors import ConfigError, StateError

MAY_CHANGE: Final = (
    "parallel",
    "optimizer.micro_batch_size",
    "activation_checkpointing",
    "compile",
    "checkpoint.every_steps",
    "checkpoint.keep",
    "checkpoint.best",
    "failures",
    "elastic",
)
"""Settings of training, or sections of them, that a resumed run may have otherwise than it began."""

_DECIDES: Final = ("model", "data", *TrainConfig.model_fields)


def require_choice(name: str, runs: Iterable[RunView]) -> None:
    """`ConfigError` if a run called `name` is not completed: it may be meant, and is not taken up in silence.

    Completed runs do not ask: nothing can go on with them.
    """
    open_runs = [view for view in runs if view.run.name == name and view.status != "completed"]
    if not open_runs:
        return
    last = open_runs[0]
    step = max((checkpoint.step for checkpoint in last.checkpoints), default=0)
    others = f" (and {len(open_runs) - 1} more)" if len(open_runs) > 1 else ""
    raise ConfigError(
        f"{name!r} has the run {last.run.id}{others}, which is {last.status} at step {step}.",
        hint=f"Go on with it: --resume {last.run.id}. Or begin anew: --new.",
    )


def taken_up(view: RunView, settings: Mapping[str, Any], *, name: str, base_digest: str, data_version: str) -> RunFact:
    """The fact that the run of `view` goes on with `settings` (a recipe as plain values).

    Raises `ConfigError` with every difference if it began as another one, or is completed.
    """
    run = view.run
    if view.status == "completed":
        raise ConfigError(f"Run {run.id} is completed: {view.verdict}.", hint="Begin a new run with --new.")
    before, after = flat(_deciding(run.recipe)), flat(_deciding(settings))
    changed = {
        path: f"{before.get(path, 'not set')} → {after.get(path, 'not set')}"
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    }
    refused = {path: change for path, change in changed.items() if not _may_change(path)}
    if run.name != name:
        refused["name"] = f"{run.name} → {name}"
    if run.base_digest != base_digest:
        refused["the base's files"] = f"{run.base_digest[:12]} → {base_digest[:12]}"
    if run.data_version != data_version:
        refused["the data version"] = f"{run.data_version} → {data_version}"
    if refused:
        listed = "; ".join(f"{path}: {change}" for path, change in refused.items())
        raise ConfigError(
            f"Run {run.id} cannot be taken up, for it began otherwise: {listed}.",
            hint=f"Set it as it was, or begin a new run with --new. These may change: {', '.join(MAY_CHANGE)}.",
        )
    return run.model_copy(update={"driver": None, "changes": run.changes | changed})


def require_checkpoints(view: RunView, found: int | None, where: str) -> None:
    """`StateError` if the run has made checkpoints and none of them is left: it would begin anew in silence.

    `found` is the step of the last good one in `where`.
    """
    steps = [checkpoint.step for checkpoint in view.checkpoints]
    if steps and found is None:
        raise StateError(
            f"Run {view.run.id} has saved itself up to step {max(steps)}, but {where} has no good checkpoint any more.",
            hint="Bring them back, or begin a new run with --new.",
        )


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings by path: `optimizer.learning_rate` → `0.001`."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = str(value)
    return found


def _deciding(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key in _DECIDES}


def _may_change(path: str) -> bool:
    return any(path == each or path.startswith(f"{each}.") for each in MAY_CHANGE)
