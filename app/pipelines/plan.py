"""`flywheel plan`: will this recipe run here, how long, and which knob changes the answer.

Imports neither ray nor torch, unless a Ray cluster is there to be asked for room. The formulas stand in
`actors.training.memory` and `actors.training.flops`.
"""

import fnmatch
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import psutil
from safetensors import SafetensorError

from actors.data import sources
from actors.data.mining import MINERS
from actors.training.layout import AXES, Layout, layer_ranges, require_divisible
from actors.training.memory import Memory, estimate, trained
from actors.training.shape import Shape, read
from app.pipelines import calibration, remedy
from app.recipe import Recipe, require_whole_turn
from cluster import environment
from cluster.config import override, parse
from cluster.errors import ConfigError, DependencyError
from cluster.models import locate
from cluster.session import Beacon
from cluster.storage import Home

GIB = 1 << 30
WORKING_DIR_LIMIT_BYTES = 100 << 20
"""Ray refuses a larger upload (413)."""
_NEVER_UPLOADED = {".git", ".venv", "venv", "__pycache__", "node_modules"}


@dataclass(frozen=True)
class Line:
    """One finding: what was computed, and what to do if it is red."""

    name: str
    status: Literal["ok", "warn", "red"]
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Room:
    """Memory that the ranks of a run have: GiB of each device, and how many ranks share one."""

    gib: float
    ranks: int
    where: str
    on_gpu: bool = False


def plan(recipe: Recipe, home: Home, folder: Path, room: Room | None = None) -> list[Line]:
    """Every finding about `recipe`; `folder` is what a job submission would upload.

    `room` is the memory of the machine that it is planned for; this machine's, shared by all ranks, if None.
    """
    if room is None:
        room = Room(psutil.virtual_memory().available / GIB, recipe.parallel.workers.max, "available here")
    return [
        *_turn(recipe),
        _batch(recipe),
        *_model(recipe, home, room),
        *_placement(recipe, home),
        *_sources(recipe),
        _upload(folder),
        _disk(home),
    ]


def upload_bytes(folder: Path) -> list[tuple[int, Path]]:
    """Files that `ray job submit --working-dir` would upload, largest first; what cannot be read is passed over."""
    ignored = _ignored_patterns(folder)

    def stays(name: str) -> bool:
        return name in _NEVER_UPLOADED or any(fnmatch.fnmatch(name, pattern) for pattern in ignored)

    sizes = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not stays(name)]
        for path in (Path(root) / name for name in names if not stays(name)):
            if path.is_file() and not path.is_symlink():
                sizes.append((path.stat().st_size, path.relative_to(folder)))
    return sorted(sizes, reverse=True)


def _ignored_patterns(folder: Path) -> list[str]:
    """Plain patterns of .gitignore and .rayignore, which Ray honours; negations are left to Ray."""
    lines = []
    for name in (".gitignore", ".rayignore"):
        path = folder / name
        if path.is_file():
            lines += path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.strip().strip("/") for line in lines if line.strip() and not line.startswith(("#", "!"))]


def _model(recipe: Recipe, home: Home, room: Room) -> list[Line]:
    try:
        folder = locate(recipe.model.base, home)
    except ConfigError as error:
        return [Line("model", "red", error.message, error.hint or "")]
    if folder is None:
        return [Line("model", "warn", f"{recipe.model.base} is not in the store yet", "The run fetches it.")]
    if (folder / "modules.json").is_file():
        return [Line("model", "red", f"{recipe.model.base} makes embeddings", "Take a causal language model as base.")]
    try:
        shape = read(folder)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        advice = "Look at its config.json and *.safetensors."
        return [Line("model", "warn", f"the shape of {folder} cannot be read: {type(error).__name__}", advice)]
    learning = trained(recipe, shape)
    found = f"{recipe.model.base}, {shape.parameters / 1e6:.0f} M parameters, {learning / 1e6:.1f} M learn"
    return [
        Line("model", "ok", found),
        _mesh(recipe, shape),
        _fits(recipe, shape, room),
        _checkpoint(recipe, learning),
        _time(recipe, shape, home),
    ]


def _turn(recipe: Recipe) -> list[Line]:
    try:
        require_whole_turn(recipe)
    except ConfigError as error:
        return [Line("turn", "warn", error.message, error.hint or "")]
    return []


def _mesh(recipe: Recipe, shape: Shape) -> Line:
    """Whether the model can be cut as `parallel` says."""
    axes = recipe.parallel
    stages = axes.pipeline * (2 if axes.schedule == "interleaved" else 1)
    try:
        layout = Layout.of(axes, axes.workers.max)
        require_divisible(
            axes.tensor,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            intermediate_size=shape.intermediate,
        )
        layer_ranges(shape.layers, stages)
    except ConfigError as error:
        return Line("mesh", "red", error.message, error.hint or "")
    wide = [f"{axis} {size}" for axis, size in zip(AXES, layout.sizes, strict=True) if size > 1]
    return Line("mesh", "ok", f"{axes.strategy}, {' × '.join(wide) or 'one process'}")


def _batch(recipe: Recipe) -> Line:
    optimizer = recipe.optimizer
    replica = recipe.parallel.ranks_per_replica
    workers = recipe.parallel.workers.max // replica
    who = "workers" if replica == 1 else f"groups of {replica} workers"
    accumulation = optimizer.global_batch_size // (workers * optimizer.micro_batch_size)
    tokens = optimizer.global_batch_size * recipe.data.max_length
    return Line(
        "batch",
        "ok",
        f"{optimizer.global_batch_size} sequences = {workers} {who} × {optimizer.micro_batch_size} × "
        f"{accumulation} accumulated; up to {tokens} tokens a step, {tokens * recipe.steps} in {recipe.steps} steps",
    )


def _fits(recipe: Recipe, shape: Shape, room: Room) -> Line:
    need = memory(recipe, shape, room)
    parts = ", ".join(f"{name} {getattr(need, name) / GIB:.2f}" for name in _PARTS)
    found = (
        f"{need.peak / GIB:.2f} GiB a rank at its peak ({parts}); {room.ranks} ranks, {room.gib:.1f} GiB {room.where}"
    )

    def fits(changed: Recipe) -> bool:
        return memory(changed, shape, room).peak * room.ranks <= room.gib * GIB

    if fits(recipe):
        return Line("memory", "ok", f"fits: {found}")
    settings = recipe.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def changed(assignments: tuple[str, ...]) -> Recipe | None:
        try:
            return parse(Recipe, override(settings, assignments), source="recipe")
        except ConfigError:
            return None

    turned = remedy.cheapest(recipe, changed, fits)
    if turned is None:
        advice = "No setting makes it fit: use a smaller base, more memory, or more workers on other machines."
    else:
        flags = " ".join(f"--set {assignment}" for assignment in turned)
        then = memory(changed(turned) or recipe, shape, room).peak / GIB
        advice = f"Cheapest change that fits ({then:.2f} GiB a rank): {flags}"
    return Line("memory", "red", f"does not fit: {found}", advice)


_PARTS = ("weights", "gradients", "optimizer", "activations", "buffers")


def memory(recipe: Recipe, shape: Shape, room: Room) -> Memory:
    """What one rank needs for this recipe, every token counted as one to learn from."""
    return estimate(recipe, shape, length=recipe.data.max_length, on_gpu=room.on_gpu)


def _checkpoint(recipe: Recipe, learning: int) -> Line:
    """Weights and two moments of what learns, in fp32; the frozen base is in none of them."""
    each, kept = 12 * learning, recipe.checkpoint.keep + 1  # the newest is committed before the oldest goes
    return Line(
        "checkpoint",
        "ok",
        f"{each / GIB:.2f} GiB each, every {recipe.checkpoint.every_steps} steps; {each * kept / GIB:.2f} GiB at most",
    )


def _time(recipe: Recipe, shape: Shape, home: Home) -> Line:
    rate = calibration.known(home, recipe)
    if rate is None:
        advice = "The first run of this kind on this machine measures it: try --set steps=20."
        return Line("time", "warn", "unknown: nothing like it has run here yet", advice)
    needed = timedelta(seconds=round(calibration.seconds(rate, recipe, shape, length=recipe.data.max_length)))
    speed = f"{rate.flops_per_s / 1e9:.1f} GFLOP/s a worker"
    return Line("time", "ok", f"about {needed} for all steps, at the {speed} of run {rate.run}")


def _placement(recipe: Recipe, home: Home) -> list[Line]:
    """Whether the live cluster, if there is one, can hold the smallest group of workers."""
    if not os.environ.get(environment.RAY_ADDRESS) and Beacon.read(home) is None:
        return []
    from app.pipelines.room import shortage  # imports ray, which a plan without a cluster does not need

    try:
        missing = shortage(recipe)
    except DependencyError as error:
        return [Line("placement", "warn", error.message, error.hint or "")]
    if missing is None:
        return [Line("placement", "ok", f"the cluster can place {recipe.parallel.workers.min} workers or more")]
    return [Line("placement", "red", missing.message, missing.hint or "")]


def _sources(recipe: Recipe) -> list[Line]:
    """Each source that the recipe names, once."""
    named = [("data", recipe.data.train.source)]
    if recipe.data.eval is not None:
        named.append(("evaluation data", recipe.data.eval.source))
    if recipe.index is not None:
        named.append(("index", recipe.index.source))
    first = {source: what for what, source in reversed(named)}
    return [_source(what, source) for source, what in reversed(first.items())]


def _source(what: str, source: str) -> Line:
    if source in MINERS:
        return Line(what, "ok", f"{source} will be mined from the installed packages")
    known = f"Give a path, or one of: {', '.join(sorted(MINERS))}."
    try:
        path = Path(source).expanduser()
        if not path.exists():
            return Line(what, "red", f"there is no {source}", known)
        found = sources.files(path)
    except ConfigError as error:
        return Line(what, "red", error.message, error.hint or known)
    except (OSError, RuntimeError) as error:
        return Line(what, "red", f"{source} cannot be looked at: {error}", known)
    return Line(what, "ok", f"{source} is there and will be read ({len(found)} files)")


def _upload(folder: Path) -> Line:
    files = upload_bytes(folder)
    total = sum(size for size, _ in files)
    found = f"{total / (1 << 20):.1f} MiB in {len(files)} files of {folder.name or folder}"
    if total <= WORKING_DIR_LIMIT_BYTES:
        return Line("working dir", "ok", found)
    biggest = ", ".join(f"{path} ({size / (1 << 20):.0f} MiB)" for size, path in files[:3])
    return Line("working dir", "warn", found, f"Ray takes 100 MiB; put the biggest into .rayignore: {biggest}.")


def _disk(home: Home) -> Line:
    root = next(parent for parent in (home.root, *home.root.parents) if parent.exists())
    free_gib = psutil.disk_usage(str(root)).free / GIB
    if free_gib >= 5:
        return Line("disk", "ok", f"{free_gib:.0f} GiB free for {home.root}")
    return Line("disk", "red", f"{free_gib:.1f} GiB free for {home.root}", "Free 5 GiB, or set FLYWHEEL_HOME.")
