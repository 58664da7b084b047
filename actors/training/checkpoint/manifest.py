"""What makes a checkpoint count: its files, their digests, and a marker that vouches for both.

`COMMITTED` holds the SHA-256 of `manifest.json`, which holds size and SHA-256 of every other file. So one small file,
written last, says that all the others were there before it, and which bytes they had. This module reads; it knows no
torch, and loads nothing of what the files hold.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

from actors.training.checkpoint.storage import DAMAGED, MARKER, RunStorage
from actors.training.job import Position
from cluster.errors import ConfigError, TrainingError
from cluster.storage import digest_file

MANIFEST: Final = "manifest.json"
POSITION: Final = "position.json"
LEDGER: Final = "ledger.json"
MODEL: Final = "model.json"
ADAPTER: Final = "adapter"
METADATA: Final = ".metadata"
FORMAT: Final = 2

NO_FILE: Final = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""What opening a file raises where there is none."""

Condition = Literal["committed", "partial", "damaged"]

_READING_THREADS: Final = 4
_STEP: Final = re.compile(r"step-([0-9]+)")


@dataclass(frozen=True)
class FileFact:
    """One file: its size in bytes and its SHA-256 in hex."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint. `metrics` are those of its step, `files` all that its manifest names."""

    name: str
    position: Position
    metrics: Mapping[str, float]
    saved_at: datetime
    files: Mapping[str, FileFact]

    @property
    def step(self) -> int:
        return self.position.step

    @property
    def size_bytes(self) -> int:
        return sum(fact.size for fact in self.files.values())


@dataclass(frozen=True)
class Found:
    """What lies under one name. `why` says what is wrong; `checkpoint` is there if it is committed."""

    name: str
    condition: Condition
    size_bytes: int
    why: str = ""
    checkpoint: Checkpoint | None = None
    wrong: tuple[str, ...] = field(default=())
    """The files that are missing or not what the manifest says."""


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """The step in a checkpoint's name, None if it is no such name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def manifest_text(files: Mapping[str, FileFact]) -> str:
    """`manifest.json` of a checkpoint with these files."""
    listed = {name: asdict(files[name]) for name in sorted(files)}
    return json.dumps({"format": FORMAT, "files": listed}, indent=2) + "\n"


def marker_text(manifest: str) -> str:
    """What `COMMITTED` holds beside this manifest."""
    return hashlib.sha256(manifest.encode()).hexdigest() + "\n"


def position_text(position: Position, metrics: Mapping[str, float], saved_at: datetime) -> str:
    """`position.json`: where the run stood, and what it measured there."""
    facts = {"position": asdict(position), "metrics": dict(metrics), "saved_at": saved_at.isoformat()}
    return json.dumps(facts, indent=2) + "\n"


def look(storage: RunStorage) -> tuple[Found, ...]:
    """Everything that lies in a run's storage, by step; sizes are checked, contents are not."""
    listing = storage.listing()
    found = [_judge(storage, name, listing[name]) for name in sorted(listing, key=_by_step)]
    if any(each.condition != "committed" for each in found):
        # One that was being removed, or sealed, in this moment is not a damaged one.
        now = storage.listing()
        found = [
            each if each.condition == "committed" else _judge(storage, each.name, now[each.name])
            for each in found
            if each.name in now
        ]
    return tuple(found)


def committed(storage: RunStorage) -> tuple[Checkpoint, ...]:
    """The committed checkpoints, oldest first."""
    return tuple(found.checkpoint for found in look(storage) if found.checkpoint is not None)


def latest(
    storage: RunStorage, *, without: Collection[str] = (), passed_over: Callable[[Found], None] | None = None
) -> Checkpoint | None:
    """The newest checkpoint that is committed and whose files are all there in their sizes.

    `without`: names that are not to be chosen, because they turned out to be damaged. `passed_over` is told of those
    that are newer and not good, the newest first.
    """
    listing = storage.listing()
    for name in sorted(listing.keys() - set(without), key=_by_step, reverse=True):
        found = _judge(storage, name, listing[name])
        if found.checkpoint is not None:
            return found.checkpoint
        if passed_over is not None:
            passed_over(found)
    return None


def next_step(storage: RunStorage) -> int:
    """The step, from 0, with which workers begin that start now."""
    last = latest(storage)
    return last.step if last is not None else 0


def find(storage: RunStorage, step: int | None, *, run_id: str) -> Checkpoint:
    """The checkpoint of `step`, or the latest; `ConfigError` if there is none that can be used.

    `TrainingError` if it is another run's.
    """
    every = look(storage)
    good = [found.checkpoint for found in every if found.checkpoint is not None]
    steps = ", ".join(str(checkpoint.step) for checkpoint in good) or "none"
    if step is None:
        if good:
            require(good[-1], run_id=run_id)
            return good[-1]
        raise ConfigError(
            f"Run {run_id} has no committed checkpoint in {storage.uri}.",
            hint=f"See: flywheel checkpoint list {run_id}.",
        )
    for checkpoint in good:
        if checkpoint.step == step:
            require(checkpoint, run_id=run_id)
            return checkpoint
    for found in every:
        if step_of(found.name) == step:
            raise ConfigError(
                f"The checkpoint of step {step} of run {run_id} is {found.condition}: {found.why}.",
                hint=f"Committed steps: {steps}.",
            )
    raise ConfigError(f"Run {run_id} has no checkpoint of step {step}.", hint=f"Committed steps: {steps}.")


def verify(storage: RunStorage, name: str) -> Found:
    """The verdict on one checkpoint after reading every byte of it.

    One that is removed meanwhile turns out damaged, and `RunStorage.listing` does not name it any more.
    """
    found = _judge(storage, name, storage.listing().get(name, {}))
    if found.checkpoint is None:
        return found
    facts = found.checkpoint.files

    def fine(file: str) -> bool:
        try:
            return storage.digest(name, file) == facts[file].sha256
        except NO_FILE:
            return False

    wrong = tuple(file for file in facts if not fine(file))
    if not wrong:
        return found
    return Found(name, "damaged", found.size_bytes, f"{_few(wrong)} changed since it was written", wrong=wrong)


def changed(folder: Path, checkpoint: Checkpoint, files: Iterable[str]) -> tuple[str, ...]:
    """Those of `files`, brought into `folder`, whose bytes are not those of the manifest."""
    listed = list(files)
    with ThreadPoolExecutor(_READING_THREADS, thread_name_prefix="digest") as pool:
        digests = list(pool.map(lambda file: digest_file(folder / file), listed))
    return tuple(
        file
        for file, digest in zip(listed, digests, strict=True)
        if file not in checkpoint.files or checkpoint.files[file].sha256 != digest
    )


def require(checkpoint: Checkpoint, *, run_id: str) -> None:
    """`TrainingError` if the checkpoint is another run's."""
    if checkpoint.position.run_id != run_id:
        raise TrainingError(
            f"{checkpoint.name} is a checkpoint of run {checkpoint.position.run_id}, not of run {run_id}.",
            hint="Move it to where it belongs, or start a new run.",
        )


def _judge(storage: RunStorage, name: str, files: Mapping[str, int]) -> Found:
    size = sum(files.values())
    if step_of(name) is None or not files.keys() & {MARKER, DAMAGED}:
        return Found(name, "partial", size, f"it has no {MARKER}: its save did not end")
    try:
        if MARKER not in files:
            return Found(name, "damaged", size, storage.read(name, DAMAGED).decode(errors="replace"))
        if MANIFEST not in files:
            return Found(name, "damaged", size, f"{MANIFEST} is missing", wrong=(MANIFEST,))
        manifest = storage.read(name, MANIFEST).decode(errors="replace")
        marker = storage.read(name, MARKER).decode(errors="replace")
        if marker != marker_text(manifest):
            return Found(name, "damaged", size, f"{MANIFEST} is not the one that was committed", wrong=(MANIFEST,))
        read: dict[str, Any] = json.loads(manifest)
        if read["format"] != FORMAT:
            why = f"its format is {read['format']!r}, this version of Flywheel knows {FORMAT}: another has written it"
            return Found(name, "damaged", size, why)
        facts = _files(read["files"])
        wrong = tuple(file for file, fact in facts.items() if files.get(file) != fact.size)
        if wrong:
            return Found(name, "damaged", size, f"{_few(wrong)} missing or cut off", wrong=wrong)
        text = storage.read(name, POSITION)
        if hashlib.sha256(text).hexdigest() != facts[POSITION].sha256:
            return Found(name, "damaged", size, f"{POSITION} changed since it was written", wrong=(POSITION,))
        noted = json.loads(text)
        checkpoint = Checkpoint(
            name,
            position=Position(**noted["position"]),
            metrics=noted["metrics"],
            saved_at=datetime.fromisoformat(noted["saved_at"]).astimezone(UTC),
            files=facts,
        )
    except NO_FILE as error:
        return Found(name, "damaged", size, f"a file is missing: {error}", wrong=(MANIFEST,))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return Found(name, "damaged", size, f"{MANIFEST} or {POSITION} cannot be read: {type(error).__name__}: {error}")
    if name != name_of(checkpoint.step):
        return Found(name, "damaged", size, f"it is the checkpoint of step {checkpoint.step} under another name")
    return Found(name, "committed", size, checkpoint=checkpoint)


def _files(listed: Mapping[str, Any]) -> dict[str, FileFact]:
    files = {name: FileFact(**fact) for name, fact in listed.items()}
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{name!r} is no file of a checkpoint")
    return files


def _by_step(name: str) -> tuple[int, str]:
    found = re.search(r"step-([0-9]+)", name)
    return (int(found[1]) if found else -1, name)


def _few(files: Collection[str]) -> str:
    listed = sorted(files)
    return f"{', '.join(listed[:3])}{f' and {len(listed) - 3} more' if len(listed) > 3 else ''}"
