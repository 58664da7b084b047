"""`flywheel plan`: will this recipe run here, and which knob changes the answer. Imports neither ray nor torch.

Memory per rank follows the ZeRO paper's count (Rajbhandari et al. 2019, arXiv:1910.02054): weights, gradients and
AdamW's two moments; activations follow Korthikanti et al. 2022 (arXiv:2205.05198), without recomputation.
"""

import fnmatch
import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import psutil
from safetensors import SafetensorError, safe_open

from actors.data import sources
from actors.data.mining import MINERS
from app.recipe import Recipe
from cluster.errors import ConfigError
from cluster.models import locate
from cluster.storage import Home

GIB = 1 << 30
WORKING_DIR_LIMIT_BYTES = 100 << 20
"""Ray refuses a larger upload (413)."""
_NEVER_UPLOADED = {".git", ".venv", "venv", "__pycache__", "node_modules"}
_NOT_TRAINED_BY_LORA = ("embed", "lm_head", "norm")


@dataclass(frozen=True)
class Line:
    """One finding: what was computed, and what to do if it is red."""

    name: str
    status: Literal["ok", "warn", "red"]
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Shape:
    """What memory depends on. `matrices` are the (out, in) shapes of the linear layers that LoRA may adapt."""

    parameters: int
    layers: int
    hidden: int
    heads: int
    matrices: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Memory:
    """GiB of one rank at its peak."""

    weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    activations_gib: float

    @property
    def total_gib(self) -> float:
        return self.weights_gib + self.gradients_gib + self.optimizer_gib + self.activations_gib


def plan(recipe: Recipe, home: Home, folder: Path) -> list[Line]:
    """Every finding about `recipe` on this machine; `folder` is what a job submission would upload."""
    return [_batch(recipe), *_model(recipe, home), *_sources(recipe), _upload(folder), _disk(home)]


def memory(recipe: Recipe, shape: Shape) -> Memory:
    """Peak of one rank. A frozen base counts its weights only; an adapter trains in fp32."""
    width = 2 if recipe.precision == "bf16" else 4
    trained = trainable(recipe, shape)
    shards = recipe.parallel.workers.max if recipe.parallel.strategy == "fsdp" else 1
    tokens = recipe.data.max_length * recipe.optimizer.micro_batch_size
    per_token_and_layer = shape.hidden * (34 + 5 * shape.heads * recipe.data.max_length / shape.hidden) * width / 2
    return Memory(
        weights_gib=(shape.parameters * width + trained * 4) / shards / GIB,
        gradients_gib=trained * 4 / shards / GIB,
        optimizer_gib=trained * 8 / shards / GIB,
        activations_gib=tokens * shape.layers * per_token_and_layer / GIB,
    )


def trainable(recipe: Recipe, shape: Shape) -> int:
    """Parameters that learn: r·(in + out) of every adapted matrix."""
    return sum(recipe.adapter.r * (rows + columns) for rows, columns in shape.matrices)


def read_shape(folder: Path) -> Shape:
    """Shape of a Hugging Face folder, from its config and the headers of its weights."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    parameters, matrices = 0, []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as weights:
            for name in weights.keys():  # noqa: SIM118 (safe_open cannot be iterated)
                size = weights.get_slice(name).get_shape()
                parameters += prod(size)
                if len(size) == 2 and not any(part in name for part in _NOT_TRAINED_BY_LORA):
                    matrices.append((size[0], size[1]))
    return Shape(
        parameters=parameters,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        matrices=tuple(matrices),
    )


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


def _model(recipe: Recipe, home: Home) -> list[Line]:
    try:
        folder = locate(recipe.model.base, home)
    except ConfigError as error:
        return [Line("model", "red", error.message, error.hint or "")]
    if folder is None:
        return [Line("model", "warn", f"{recipe.model.base} is not in the store yet", "The run fetches it.")]
    if (folder / "modules.json").is_file():
        return [Line("model", "red", f"{recipe.model.base} makes embeddings", "Take a causal language model as base.")]
    try:
        shape = read_shape(folder)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        advice = "Look at its config.json and *.safetensors."
        return [Line("model", "warn", f"the shape of {folder} cannot be read: {type(error).__name__}", advice)]
    found = f"{recipe.model.base}, {shape.parameters / 1e6:.0f} M parameters"
    return [Line("model", "ok", found), _fits(recipe, memory(recipe, shape))]


def _batch(recipe: Recipe) -> Line:
    optimizer, workers = recipe.optimizer, recipe.parallel.workers.max
    accumulation = optimizer.global_batch_size // (workers * optimizer.micro_batch_size)
    tokens = optimizer.global_batch_size * recipe.data.max_length
    return Line(
        "batch",
        "ok",
        f"{optimizer.global_batch_size} sequences = {workers} workers × {optimizer.micro_batch_size} × "
        f"{accumulation} accumulated; up to {tokens} tokens a step, {tokens * recipe.steps} in {recipe.steps} steps",
    )


def _fits(recipe: Recipe, need: Memory) -> Line:
    workers = recipe.parallel.workers.max
    available_gib = psutil.virtual_memory().available / GIB
    found = (
        f"{need.total_gib:.2f} GiB a rank (weights {need.weights_gib:.2f}, gradients {need.gradients_gib:.2f}, "
        f"optimizer {need.optimizer_gib:.2f}, activations {need.activations_gib:.2f}); "
        f"{workers} ranks, {available_gib:.1f} GiB available here"
    )
    if need.total_gib * workers <= available_gib:
        return Line("memory", "ok", f"fits: {found}")
    parts = {
        "lower optimizer.micro_batch_size or data.max_length": need.activations_gib,
        "lower adapter.r": need.gradients_gib + need.optimizer_gib,
        "lower parallel.workers.max, or use a smaller base or precision: bf16": need.weights_gib,
    }
    return Line("memory", "red", f"does not fit: {found}", max(parts, key=lambda advice: parts[advice]))


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
