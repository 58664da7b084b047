"""`flywheel checkpoint`: what a run has saved, whether it is still whole, and models made of it. Needs no Ray."""

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from actors.registry import views
from actors.registry.reader import read_state
from actors.registry.state import State
from actors.training.checkpoint import manifest
from actors.training.checkpoint.manifest import Condition, Found
from actors.training.checkpoint.storage import RunStorage, open_storage
from actors.training.config import CheckpointConfig
from cluster import models
from cluster.config import Config, parse
from cluster.errors import ConfigError, RequestError
from cluster.progress import Progress, Sink
from cluster.signing import Verifier
from cluster.storage import Home, require_file_name


class Saved(Config):
    """One checkpoint, or what is left of one. `kept`: why the run's retention does not remove it; None if it may."""

    name: str
    step: int | None
    saved_at: datetime | None
    size_bytes: int
    condition: Condition
    why: str
    metrics: dict[str, float]
    kept: str | None


class Listing(Config):
    """All that lies in a run's storage, oldest first."""

    run_id: str
    uri: str
    checkpoints: tuple[Saved, ...]


class Verdict(Config):
    """One checkpoint after every byte of it has been read. `wrong` names the files that are not as they were."""

    name: str
    condition: Condition
    size_bytes: int
    why: str
    wrong: tuple[str, ...]


class Exported(Config):
    """A folder that others load: an adapter, the base with it merged, or a model of which all weights have learnt."""

    checkpoint: str
    what: str
    target: Path
    size_bytes: int


def listing(home: Home, run_id: str) -> Listing:
    """What a run has saved."""
    state = read_state(home)
    storage, policy = _storage(home, state, run_id)
    found = _look(storage, run_id)
    _require_any(found, storage, run_id)
    kept = _kept(state, policy, found, run_id)
    return Listing(run_id=run_id, uri=storage.uri, checkpoints=tuple(_saved(each, kept) for each in found))


def verify(home: Home, reference: str, sink: Sink) -> list[Verdict]:
    """Read every file of one checkpoint (`RUN/step-N`), or of all of a run that are not half-written."""
    run_id, step = _parts(reference)
    storage, _ = _storage(home, read_state(home), run_id)
    found = _look(storage, run_id)
    _require_any(found, storage, run_id)
    asked = [each for each in found if (each.condition != "partial" if step is None else _is(each, step))]
    if not asked:
        steps = ", ".join(str(each.checkpoint.step) for each in found if each.checkpoint) or "none"
        raise ConfigError(
            f"Run {run_id} has no {'checkpoint' if step is None else f'checkpoint of step {step}'} to verify.",
            hint=f"Committed steps: {steps}.",
        )
    verdicts = []
    for place, each in enumerate(asked):
        sink(Progress("verify", place, len(asked), "checkpoints", note=each.name))
        read = manifest.verify(storage, each.name) if each.condition == "committed" else each
        if read.condition != "committed" and read.name not in storage.listing():
            continue  # its run has removed it meanwhile
        verdicts.append(
            Verdict(
                name=read.name, condition=read.condition, size_bytes=read.size_bytes, why=read.why, wrong=read.wrong
            )
        )
    if not verdicts:
        hint = f"See flywheel checkpoint list {run_id}."
        raise ConfigError(f"{reference} has just been removed by its run.", hint=hint)
    return verdicts


def export(home: Home, reference: str, target: Path, *, merged: bool) -> Exported:
    """Write the model of a checkpoint (`RUN`: the last; `RUN/step-N`) to the new folder `target`.

    A merged or whole model needs the base in the model store, and a signature that vouches for it.
    """
    run_id, step = _parts(reference)
    storage, _ = _storage(home, read_state(home), run_id)
    checkpoint = manifest.find(storage, step, run_id=run_id)
    from actors.training.checkpoint.export import export as write  # imports torch

    def base(name: str, digest: str) -> Path:
        for model in models.installed(home):
            if model.digest == digest:
                models.require_signed(model, home, Verifier())
                return model.path
        raise ConfigError(
            f"The base {name} (digest {digest[:12]}) of run {run_id} is not in the model store.",
            hint="It comes back when a recipe that names it is run; or export the adapter alone, without --merged.",
        )

    target = target.expanduser().absolute()
    what = write(storage, checkpoint, target, merged=merged, base=base)
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    return Exported(checkpoint=f"{run_id}/step-{checkpoint.step}", what=what, target=target, size_bytes=size)


def _parts(reference: str) -> tuple[str, int | None]:
    """`run`, `run/40` and `run/step-40`, as checkpoint ids are written."""
    run_id, slash, rest = reference.partition("/")
    number = rest.removeprefix("step-")
    if slash and not (number.isascii() and number.isdecimal() and len(number) <= 12):
        raise ConfigError(f"{reference!r} names no checkpoint.", hint="Write RUN, or RUN/step-40.")
    return require_file_name(run_id, what="run id"), int(number) if slash else None


def _storage(home: Home, state: State, run_id: str) -> tuple[RunStorage, CheckpointConfig]:
    """Where a run has said that its checkpoints lie; a run that the registry does not know may still have a folder."""
    require_file_name(run_id, what="run id")
    try:
        recipe: Mapping[str, Any] = views.run(state, run_id).run.recipe
    except RequestError:
        if not (home.runs / run_id).is_dir():
            raise
        recipe = {}
    policy = parse(CheckpointConfig, dict(recipe.get("checkpoint") or {}), source=f"run {run_id}")
    return open_storage(home, run_id, policy.storage), policy


def _look(storage: RunStorage, run_id: str) -> tuple[Found, ...]:
    """What lies there; of another run's checkpoint, that it is none of this run."""
    found = []
    for each in manifest.look(storage):
        owner = each.checkpoint.position.run_id if each.checkpoint else run_id
        if owner != run_id:
            each = Found(each.name, "damaged", each.size_bytes, f"it is a checkpoint of run {owner}")
        found.append(each)
    return tuple(found)


def _require_any(found: tuple[Found, ...], storage: RunStorage, run_id: str) -> None:
    if not found:
        raise ConfigError(f"Run {run_id} has no checkpoints in {storage.uri}.", hint="See: flywheel status.")


def _kept(state: State, policy: CheckpointConfig, found: tuple[Found, ...], run_id: str) -> dict[int, str]:
    from actors.training.checkpoint.retention import to_remove

    there = [each.checkpoint for each in found if each.checkpoint is not None]
    newest = {checkpoint.step for checkpoint in sorted(there, key=lambda each: each.step)[-policy.keep :]}
    may_go = {checkpoint.step for checkpoint in to_remove(there, policy)}
    kept = {each.step: f"one of the newest {policy.keep}" for each in there if each.step in newest}
    if policy.best is not None:
        kept |= {
            each.step: f"one of the best {policy.best.keep} by {policy.best.metric}"
            for each in there
            if each.step not in newest | may_go
        }
    return kept | views.needed_checkpoints(state, run_id)


def _saved(found: Found, kept: Mapping[int, str]) -> Saved:
    checkpoint = found.checkpoint
    step = checkpoint.step if checkpoint else manifest.step_of(found.name)
    return Saved(
        name=found.name,
        step=step,
        saved_at=checkpoint.saved_at if checkpoint else None,
        size_bytes=found.size_bytes,
        condition=found.condition,
        why=found.why,
        metrics=dict(checkpoint.metrics) if checkpoint else {},
        kept=kept.get(step) if checkpoint and step is not None else None,
    )


def _is(found: Found, step: int) -> bool:
    return manifest.step_of(found.name) == step
