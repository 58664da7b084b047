"""`flywheel plan`: will this recipe run here, how long, and which knob changes the answer.

Imports neither ray nor torch, unless a Ray cluster is there to be asked for room. The formulas stand in
`actors.training.memory` and `actors.training.flops`.
"""

import fnmatch
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import psutil

from actors.data import sources
from actors.data.mining import MINERS
from actors.training import support
from actors.training.layout import AXES, Layout
from actors.training.memory import estimate, trained
from actors.training.shape import Shape
from app.pipelines import calibration, remedy
from app.recipe import Recipe
from cluster import environment
from cluster.config import override, parse
from cluster.errors import ConfigError, DependencyError
from cluster.models import TOKENIZER_FILES, locate
from cluster.session import Beacon, default_cpus
from cluster.storage import Home

GIB = 1 << 30
WORKING_DIR_LIMIT_BYTES = 100 << 20
"""Ray refuses a larger upload (413)."""
LIBRARIES_GIB = 0.6
"""What a worker holds before it has a model: Python, torch, transformers, Ray."""
CUDA_GIB = 1.0
"""What CUDA and NCCL keep of a GPU for themselves: assumed, not measured."""
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
    """Memory that the ranks of a run have: `gib` of each GPU, which is one rank's, or of the machine that all share."""

    gib: float
    where: str
    on_gpu: bool = False

    def ranks(self, workers: int) -> int:
        """How many of `workers` share it."""
        return 1 if self.on_gpu else workers


def plan(recipe: Recipe, home: Home, folder: Path, room: Room | None = None) -> list[Line]:
    """Every finding about `recipe`; `folder` is what a job submission would upload.

    `room` is the memory of the machine that it is planned for; this machine's, shared by all ranks, if None.
    """
    if room is None:
        room = Room(psutil.virtual_memory().available / GIB, "available here")
    return [
        _batch(recipe),
        *_model(recipe, home, room),
        *_placement(recipe, home, room),
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
    embeds, contrastive = (folder / "modules.json").is_file(), recipe.objective.kind == "contrastive"
    if embeds and not contrastive:
        advice = "Take a causal language model as base, or objective.kind contrastive."
        return [Line("model", "red", f"{recipe.model.base} makes embeddings", advice)]
    if contrastive and not embeds:
        advice = "Take an embedder as base, such as all-minilm-l6-v2, or objective.kind sft."
        return [Line("model", "red", f"{recipe.model.base} makes no embeddings", advice)]
    try:
        shape = support.shape_of(folder)
        if contrastive:
            support.require(recipe, shape)
    except ConfigError as error:
        return [Line("model", "red", error.message, error.hint or "")]
    learning = trained(recipe, shape)
    found = f"{recipe.model.base}, {shape.parameters / 1e6:.0f} M parameters, {learning / 1e6:.1f} M learn"
    if contrastive:
        # The formulas of memory and time are those of decoders on full rows.
        unknown = Line(
            "memory", "warn", "memory and time of an embedder are not estimated", "Try the recipe with --set steps=2."
        )
        return [Line("model", "ok", found), *_tokenizer(folder), unknown, _checkpoint(recipe, shape, home)]
    return [
        Line("model", "ok", found),
        *_tokenizer(folder),
        _mesh(recipe, shape),
        *_dropout(recipe),
        _fits(recipe, shape, room),
        *_host(recipe, shape, room),
        _checkpoint(recipe, shape, home),
        _time(recipe, shape, home, room),
    ]


def _tokenizer(folder: Path) -> list[Line]:
    if any((folder / name).is_file() for name in TOKENIZER_FILES) or any(folder.glob("*.model")):
        return []
    return [Line("tokenizer", "red", f"{folder} has no tokenizer", "Put the files of the model's tokenizer there.")]


def _mesh(recipe: Recipe, shape: Shape) -> Line:
    """Whether a model of this shape can be trained, and cut as `parallel` says."""
    axes = recipe.parallel
    try:
        support.require(recipe, shape)
    except ConfigError as error:
        return Line("mesh", "red", error.message, error.hint or "")
    layout = Layout.of(axes, axes.workers.max)
    wide = [f"{axis} {size}" for axis, size in zip(AXES, layout.sizes, strict=True) if size > 1]
    return Line("mesh", "ok", f"{axes.strategy}, {' × '.join(wide) or 'one process'}")


def _dropout(recipe: Recipe) -> list[Line]:
    """What is dropped is drawn by each rank for its rows, so it is the same on the same mesh, and on another is not."""
    axes, share = recipe.parallel, recipe.adapter.dropout
    if recipe.adapter.kind == "none" or not share or axes.workers.max == axes.tensor:
        return []
    found = f"adapter.dropout {share} is drawn anew for {axes.workers.max} workers: on another mesh it is another run"
    return [Line("dropout", "warn", found, "Set adapter.dropout=0 for losses that are equal on every mesh.")]


def _batch(recipe: Recipe) -> Line:
    optimizer = recipe.optimizer
    replica = recipe.parallel.ranks_per_replica
    workers = recipe.parallel.workers.max // replica
    who = "workers" if replica == 1 else f"groups of {replica} workers"
    accumulation = optimizer.global_batch_size // (workers * optimizer.micro_batch_size)
    tokens = optimizer.global_batch_size * recipe.data.max_length
    if recipe.objective.kind == "contrastive":
        return Line(
            "batch",
            "ok",
            f"{optimizer.global_batch_size} pairs, each contrasted with all others = {workers} workers × "
            f"{optimizer.micro_batch_size} × {accumulation}"
            + (", embedded twice to hold one micro-batch at a time" if accumulation > 1 else ""),
        )
    return Line(
        "batch",
        "ok",
        f"{optimizer.global_batch_size} sequences = {workers} {who} × {optimizer.micro_batch_size} × "
        f"{accumulation} accumulated; up to {tokens} tokens a step, {tokens * recipe.steps} in {recipe.steps} steps",
    )


@dataclass(frozen=True)
class Need:
    """What a rank of a run of `workers` takes of a `Room`, in bytes. `parts` are named and add up to `bytes`."""

    workers: int
    parts: Mapping[str, float]

    @property
    def bytes(self) -> float:
        return sum(self.parts.values())


def need(recipe: Recipe, shape: Shape, room: Room) -> Need:
    """The largest need of all group sizes that the recipe allows, as the room sees it. Every token is learnt from.

    An elastic run that has shrunk holds more on each rank; one that has grown has more ranks on a shared machine.
    """
    sizes = {recipe.parallel.workers.min, recipe.parallel.workers.max}
    needs = [Need(workers, _parts(recipe, shape, room, workers)) for workers in sizes]
    return max(needs, key=lambda each: each.bytes * room.ranks(each.workers))


def _parts(recipe: Recipe, shape: Shape, room: Room, workers: int) -> dict[str, float]:
    memory = estimate(recipe, shape, length=recipe.data.max_length, workers=workers, on_gpu=room.on_gpu)
    names = ("weights", "gradients", "optimizer", "activations", "buffers")
    parts = {name: getattr(memory, name) for name in names}
    if room.on_gpu:
        return {**parts, "CUDA": CUDA_GIB * GIB}
    if memory.read > memory.peak + memory.copied:  # then the start is the peak
        return {"the base as it is read": memory.read, "libraries": LIBRARIES_GIB * GIB}
    return {**parts, "copy of a checkpoint": memory.copied, "libraries": LIBRARIES_GIB * GIB}


def _fits(recipe: Recipe, shape: Shape, room: Room) -> Line:
    def fits(changed: Recipe) -> bool:
        try:
            support.require(changed, shape)
        except ConfigError:
            return False
        wanted = need(changed, shape, room)
        return wanted.bytes * room.ranks(wanted.workers) <= room.gib * GIB

    wanted = need(recipe, shape, room)
    ranks = room.ranks(wanted.workers)
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in wanted.parts.items())
    shrunk = " when the run has shrunk to them" if wanted.workers < recipe.parallel.workers.max else ""
    found = (
        f"{wanted.bytes / GIB:.2f} GiB a rank at its peak ({parts}); "
        f"{ranks} rank{'s' * (ranks > 1)}{shrunk}, {room.gib:.1f} GiB {room.where}"
    )
    if wanted.bytes * ranks <= room.gib * GIB:
        return Line("memory", "ok", f"fits: {found}")
    settings = recipe.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def changed(assignments: tuple[str, ...]) -> Recipe | None:
        try:
            return parse(Recipe, override(settings, assignments), source="recipe")
        except ConfigError:
            return None

    def flags(assignments: tuple[str, ...]) -> str:
        then = need(changed(assignments) or recipe, shape, room).bytes / GIB
        return f"({then:.2f} GiB a rank): {' '.join(f'--set {each}' for each in assignments)}"

    advice = []
    turned = remedy.cheapest(recipe, changed, fits)
    if turned:
        advice.append(f"Cheapest change that fits {flags(turned)}.")
    if room.on_gpu and (turned is None or remedy.gives_up(recipe, turned)):
        more = remedy.fewest_workers(recipe, changed, fits)
        advice += [f"As it is, it takes more GPUs {flags(more)}."] if more else []
    if room.on_gpu and not advice and (more := remedy.fewest_workers(recipe, changed, fits, give_up=True)):
        advice.append(f"It takes more GPUs too {flags(more)}.")
    if not advice:
        advice.append("No setting makes it fit: use a smaller base, more memory, or more workers on other machines.")
    return Line("memory", "red", f"does not fit: {found}", " ".join(advice))


def _host(recipe: Recipe, shape: Shape, room: Room) -> list[Line]:
    """What a run on GPUs takes of the memory of their machines."""
    if not room.on_gpu:
        return []
    memory = estimate(recipe, shape, length=recipe.data.max_length, on_gpu=True)
    found = (
        f"{memory.read / GIB:.1f} GiB a rank of its machine's memory while the base is read, "
        f"then {memory.copied / GIB:.1f} for the copy of a checkpoint"
    )
    return [Line("host memory", "ok", found)]


def _checkpoint(recipe: Recipe, shape: Shape, home: Home) -> Line:
    """Weights and two moments of what learns, in fp32; the frozen base is in none of them."""
    policy, each = recipe.checkpoint, 12 * trained(recipe, shape)
    kept = policy.keep + (policy.best.keep if policy.best else 0) + 1  # the newest is committed before the oldest goes
    here = each if (policy.storage or "").startswith("s3://") else each * kept
    if recipe.adapter.kind == "none":
        here += 4 * shape.parameters  # the model that the run leaves
    found = f"{each / GIB:.2f} GiB each, every {policy.every_steps} steps; {here / GIB:.2f} GiB at most on a disk here"
    folder = home.root if policy.storage is None or policy.storage.startswith("s3://") else Path(policy.storage)
    free = _free(folder)
    if here <= free:
        return Line("checkpoint", "ok", found)
    advice = "Lower checkpoint.keep, or put them elsewhere: checkpoint.storage, a folder or s3://bucket/prefix."
    return Line("checkpoint", "red", f"{found}; {free / GIB:.2f} GiB are free for {folder}", advice)


def _time(recipe: Recipe, shape: Shape, home: Home, room: Room) -> Line:
    rate = calibration.known(home, recipe, on_gpu=room.on_gpu)
    if rate is None:
        advice = "The first run of this kind on this machine measures it: try --set steps=20."
        return Line("time", "warn", "unknown: nothing like it has run here yet", advice)
    needed = timedelta(seconds=round(calibration.seconds(rate, recipe, shape, length=recipe.data.max_length)))
    speed = f"{rate.flops_per_s / 1e9:.1f} GFLOP/s a worker"
    return Line("time", "ok", f"about {needed} for all steps, without the start, at the {speed} of run {rate.run}")


def _placement(recipe: Recipe, home: Home, room: Room) -> list[Line]:
    """Whether the live cluster, or the one that a run starts here, can hold the smallest group of workers."""
    if not os.environ.get(environment.RAY_ADDRESS) and Beacon.read(home) is None:
        least, cpus = recipe.parallel.workers.min, default_cpus()
        if room.on_gpu or least <= cpus:  # GPUs are another machine's, that nobody has asked for room
            return []
        found = f"{least} workers of 1 CPU each cannot be placed: the Ray that a run starts here has {cpus} CPUs"
        advice = f"Lower parallel.workers.min, or set {environment.RAY_ADDRESS} to a cluster with more."
        return [Line("placement", "red", found, advice)]
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
    free_gib = _free(home.root) / GIB
    if free_gib >= 5:
        return Line("disk", "ok", f"{free_gib:.0f} GiB free for {home.root}")
    return Line("disk", "red", f"{free_gib:.1f} GiB free for {home.root}", "Free 5 GiB, or set FLYWHEEL_HOME.")


def _free(folder: Path) -> int:
    """Bytes that are free where `folder` is or will be."""
    folder = folder.expanduser().absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return int(psutil.disk_usage(str(there)).free)
