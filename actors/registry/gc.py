"""Garbage: what may be deleted, and how, so that nothing anybody needs is ever without its only copy.

`look` says what lies on the disk, `plan` what of it may go, `collect` does it. `plan` is pure: a dry run is a plan.

Kept are the files of every version that an alias, a rollback, a gate, a run that goes on, a replica or a pin reaches;
of what those were made from; and the checkpoints of runs that go on or can be taken up again, and of versions that are
kept. Free are versions that nothing reaches, folders that no version points to, what dead uploads left behind, cached
copies of adapters that nothing reaches, and checkpoints of completed runs that nothing kept was made from, with what
was exported of them, wherever the run was told to save itself. Nothing is freed before it has been untouched, and
nothing has happened to its version, for a grace period.

A registration touches the folder that it publishes, or finds, under the same lock that `collect` holds while it takes
one away; and it makes the files again if they are gone. So one that runs at this moment is spared by the grace period,
or comes later and has its own copy. What is only on its way has a lock of its own, held by who writes it: it is left
alone however short the grace period is.
"""

import logging
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Literal, TypeVar

from actors.registry.facts import CheckpointFact, EvaluationFact, RunFact, Version
from actors.registry.state import State, held, versions_of
from actors.registry.upload import FOLDER_DIGITS, UPLOAD_PREFIX, unclaimed
from actors.training.checkpoint import manifest
from actors.training.checkpoint.storage import RunStorage, open_storage, storage_at
from cluster.errors import FlywheelError
from cluster.signing import SIGNATURE_SUFFIX, signature_path
from cluster.storage import LOCK, PARTIAL_PREFIX, Home, abandoned, only_one

What = Literal["version", "signature", "upload", "scratch", "trash", "cached adapter", "checkpoint", "export"]

GRACE: Final = timedelta(days=1)
TRASH_PREFIX: Final = f"{PARTIAL_PREFIX}trash-"
_VERSION: Final = re.compile(rf"[0-9a-f]{{{FOLDER_DIGITS}}}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_STEP: Final = re.compile(r"step-[0-9]+")
_EXPORT: Final = re.compile(r"export-(step-[0-9]+)")

_logger = logging.getLogger(__name__)
_AnyFact = TypeVar("_AnyFact")


@dataclass(frozen=True)
class Found:
    """Something on the disk. `touched_at` is the newest time in it, `size_bytes` counts its files and its signature.

    `uri` is where it lies if that is no disk; `path` then has its last two parts only.
    """

    what: What
    path: Path
    size_bytes: int
    touched_at: datetime
    uri: str = ""

    @property
    def where(self) -> Path | str:
        """Where it lies."""
        return self.uri or self.path


@dataclass(frozen=True)
class Item:
    """Something that may go, and why. `version_ids`: the versions whose files it holds."""

    found: Found
    why: str
    version_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What may go, and why the rest stays, by version id."""

    free: tuple[Item, ...]
    kept: Mapping[str, str]
    now: datetime
    grace: timedelta
    loaded: frozenset[str] = frozenset()

    @property
    def version_ids(self) -> tuple[str, ...]:
        """Versions that lose their files: to be recorded as collected before `collect` begins."""
        return tuple(sorted({id_ for item in self.free for id_ in item.version_ids}))

    @property
    def size_bytes(self) -> int:
        """Bytes that would be freed."""
        return sum(item.found.size_bytes for item in self.free)


@dataclass(frozen=True)
class Outcome:
    """What has been freed; and what was to be, but is left, with the reason."""

    freed: tuple[Item, ...]
    left: Mapping[Path | str, str] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes that have been freed."""
        return sum(item.found.size_bytes for item in self.freed)


def reachable(state: State, loaded: Collection[str] = ()) -> dict[str, str]:
    """Why the files of a version stay, by version id. `loaded`: ids of versions that replicas hold now.

    More than `state.held`, which knows parents by their ids only: a base may be named by its digest.
    """
    why = dict(held(state)) | {id_: "a replica holds it" for id_ in loaded if id_ in state.stages}
    versions = {version.id: version for several in state.versions.values() for version in several}
    by_digest: dict[str, list[str]] = {}
    for version in versions.values():
        by_digest.setdefault(version.digest, []).append(version.id)

    def bases(of: Version | RunFact) -> list[str]:
        parent = of.parent if isinstance(of, Version) else None
        return [id_ for id_ in (parent, of.base, *by_digest.get(of.base_digest, ())) if id_ in versions]

    for run in _facts(state, RunFact):
        if _may_go_on(state, run.id):
            for id_ in bases(run):
                why.setdefault(id_, f"run {run.id} trains on it")
    waiting = list(why)
    while waiting:
        child = waiting.pop()
        for id_ in bases(versions[child]):
            if id_ not in why:
                why[id_] = f"{child} was made from it"
                waiting.append(id_)
    return why


def look(home: Home, state: State | None = None) -> tuple[Found, ...]:
    """Everything in the version store, the adapter cache and the runs that `plan` has an opinion on.

    With `state`, also what completed runs of this installation have saved elsewhere, in folders and in S3.
    """
    storages = _elsewhere(home, state) if state is not None else []
    remote = [storage for storage in storages if "://" in storage.uri]
    folders = [Path(storage.uri) for storage in storages if storage not in remote]
    candidates = [*_candidates(home), *(each for folder in folders for each in _of_run(folder))]
    here = [found for what, path in candidates if (found := _find(what, path)) is not None]
    return (*here, *(found for storage in remote for found in _remote(storage)))


def plan(
    state: State,
    found: Iterable[Found],
    home: Home,
    *,
    now: datetime,
    grace: timedelta = GRACE,
    loaded: Collection[str] = (),
) -> Plan:
    """What of `found` may go. Reads nothing; `home` says where things belong."""
    why = reachable(state, loaded)
    rules = _Rules(state, home, why, now - grace)
    free = [item for one in found if (item := rules.judge(one)) is not None]
    return Plan(tuple(free), why, now, grace, frozenset(loaded))


def collect(plan_: Plan, home: Home, state: Callable[[], State]) -> Outcome:
    """Delete what the plan says, each thing looked at again with the `state` of that moment.

    The caller has recorded `plan_.version_ids` as collected. Killed at any point, it leaves whole folders, and
    `.partial-trash-…` for the next time.
    """
    freed: list[Item] = []
    left: dict[Path | str, str] = {}
    for item in plan_.free:
        where = item.found.where
        try:
            reason = (_remove_remote if item.found.uri else _remove)(item, plan_, home, state)
        except (OSError, FlywheelError) as error:
            reason = f"it cannot be deleted: {getattr(error, 'strerror', None) or error}"
        if reason:
            left[where] = reason
            _logger.warning("%s stays: %s", where, reason)
        else:
            freed.append(item)
            _logger.info("freed %s (%d bytes): %s", where, item.found.size_bytes, item.why)
    return Outcome(tuple(freed), left)


def location(version: Version, home: Home) -> Path:
    """The absolute folder of a version's files."""
    return home.versions / version.path


class _Rules:
    """The verdict on one thing after another, for one state."""

    def __init__(self, state: State, home: Home, why: Mapping[str, str], before: datetime) -> None:
        self._state = state
        self._home = home
        self._why = why
        self._before = before
        self._owners: dict[Path, list[Version]] = {}
        self._digests: set[str] = set()
        for version in (version for several in state.versions.values() for version in several):
            self._owners.setdefault(_plain(location(version, home)), []).append(version)
            if version.id in why:
                self._digests.add(version.digest)
        # Not by the path in the fact: one that came with an import was written by somebody else.
        self._checkpoints = {(fact.run_id, fact.step): fact for fact in _facts(state, CheckpointFact)}
        kept = [version for several in state.versions.values() for version in several if version.id in why]
        self._made_from = {version.checkpoint_id for version in kept} | {
            fact.checkpoint_id for fact in _facts(state, EvaluationFact) if fact.passed
        }
        self._last: dict[str, datetime] = {}
        """When something last happened to a version, however old its files are."""
        for events in state.history.values():
            for event in events:
                self._last |= dict.fromkeys(versions_of(event.fact), event.at)
        self._newest: dict[str, datetime] = {}
        for event in state.entries.values():
            if isinstance(event.fact, CheckpointFact):
                self._newest[event.fact.run_id] = event.at

    def judge(self, found: Found) -> Item | None:
        if found.what == "trash":
            return Item(found, "it was being deleted when its process died")
        if found.touched_at >= self._before:
            return None
        match found.what:
            case "version":
                return self._version(found)
            case "cached adapter":
                if found.path.name in self._digests:
                    return None
                return Item(found, "a copy of what is no version any more")
            case "checkpoint" | "export":
                return self._checkpoint(found)
            case "signature":
                return Item(found, "the signature of a folder that is gone")
            case "upload":
                return Item(found, "an upload that nobody went on with")
            case _:
                if found.path.is_relative_to(self._home.runs) and found.path.parent.name not in self._state.ended:
                    return None  # it may be writing
                return Item(found, "left behind by a process that died")

    def _version(self, found: Found) -> Item | None:
        owners = self._owners.get(_plain(found.path), [])
        if any(version.id in self._why for version in owners):
            return None
        if not owners:
            return Item(found, "no version points to it")
        ids = tuple(version.id for version in owners)
        if any(self._last[id_] >= self._before for id_ in ids if id_ not in self._state.collected):
            return None
        stages = ", ".join(f"{id_} is {self._state.stages[id_]}" for id_ in ids)
        return Item(found, f"{stages}, and nothing reaches it", ids)

    def _checkpoint(self, found: Found) -> Item | None:
        step = manifest.step_of(found.path.name.removeprefix("export-"))
        fact = self._checkpoints.get((found.path.parent.name, step)) if step is not None else None
        # What the registry has not heard of may be committed any moment.
        if fact is None or _may_go_on(self._state, fact.run_id) or fact.id in self._made_from:
            return None
        if self._newest[fact.run_id] >= self._before:
            return None
        return Item(found, f"run {fact.run_id} is completed, and nothing that stays was made from it")


def _may_go_on(state: State, run_id: str) -> bool:
    """Whether a run runs, or can be taken up again from its last checkpoint."""
    return run_id not in state.ended or state.ended[run_id].status != "completed"


def _facts(state: State, kind: type[_AnyFact]) -> Iterator[_AnyFact]:
    return (event.fact for event in state.entries.values() if isinstance(event.fact, kind))


def _plain(path: Path) -> Path:
    """Without `..` and `.`, the links of folders above it followed: one folder is one path."""
    return path.parent.resolve() / path.name


def _candidates(home: Home) -> Iterator[tuple[What, Path]]:
    for store in (path for path in _entries(home.versions) if path.is_dir() and not path.name.startswith(".")):
        yield from _signed_folders(store, _VERSION, "version")
    yield from _signed_folders(home.adapter_cache, _DIGEST, "cached adapter")
    for run in (path for path in _entries(home.runs) if path.is_dir()):
        yield from _of_run(run)


def _of_run(folder: Path) -> Iterator[tuple[What, Path]]:
    for path in _entries(folder):
        passing = _kind_of(path)
        if passing is not None:
            yield passing, path
        elif _STEP.fullmatch(path.name):
            yield "checkpoint", path
        elif _EXPORT.fullmatch(path.name):
            yield "export", path


def _elsewhere(home: Home, state: State) -> list[RunStorage]:
    """Where completed runs have saved themselves, if not in the home; those of this installation alone."""
    found: list[RunStorage] = []
    for run in _facts(state, RunFact):
        where = (run.recipe.get("checkpoint") or {}).get("storage")
        # Who has trained here has a folder here. A run that came with an import names places of somebody else.
        if where and not _may_go_on(state, run.id) and (home.runs / run.id).is_dir():
            found.append(open_storage(home, run.id, where))
    return found


def _remote(storage: RunStorage) -> Iterator[Found]:
    """The checkpoints in S3. Nothing if it does not answer: what is not seen is not freed."""
    run_id = storage.uri.rpartition("/")[2]
    try:
        for checkpoint in manifest.committed(storage):
            if checkpoint.position.run_id == run_id:
                place = f"{storage.uri}/{checkpoint.name}"
                path = Path(run_id, checkpoint.name)
                yield Found("checkpoint", path, checkpoint.size_bytes, checkpoint.saved_at, place)
    except FlywheelError as error:
        _logger.warning("the checkpoints of run %s stay: %s", run_id, error)


def _signed_folders(parent: Path, named: re.Pattern[str], what: What) -> Iterator[tuple[What, Path]]:
    """The folders in `parent` that are `named` so, what is on its way in or out of it, and signatures left alone."""
    for path in _entries(parent):
        passing = _kind_of(path)
        if passing is not None:
            yield passing, path
        elif named.fullmatch(path.name):
            yield what, path
        elif _is_stray(path, named):
            yield "signature", path


def _kind_of(path: Path) -> What | None:
    """What its name says of a thing that is on its way in or out; None for anything else."""
    if path.name.startswith(TRASH_PREFIX):
        return "trash"
    if path.name.startswith(UPLOAD_PREFIX):
        return "upload"
    return "scratch" if path.name.startswith(PARTIAL_PREFIX) else None


def _is_stray(path: Path, folder_name: re.Pattern[str]) -> bool:
    folder = _signed_by(path)
    return folder != path and bool(folder_name.fullmatch(folder.name)) and not folder.exists()


def _signed_by(signature: Path) -> Path:
    """The folder beside it that a signature is for."""
    return signature.with_name(signature.name.removesuffix(SIGNATURE_SUFFIX))


def _entries(folder: Path) -> list[Path]:
    try:
        # A link is nobody's folder of ours, and what it leads to even less.
        return sorted(path for path in folder.iterdir() if not path.is_symlink())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _find(what: What, path: Path) -> Found | None:
    """None if it is gone by now."""
    try:
        facts = [path.lstat()]
        for root, folders, files in os.walk(path):
            facts += [os.lstat(os.path.join(root, name)) for name in (*folders, *files)]  # noqa: PTH118 (thousands)
        size = sum(one.st_size for one in facts if not stat.S_ISDIR(one.st_mode))
        if what in ("version", "cached adapter") and signature_path(path).is_file():
            size += signature_path(path).stat().st_size
    except FileNotFoundError:
        return None
    return Found(what, path, size, datetime.fromtimestamp(max(one.st_mtime for one in facts), UTC))


def _remove(item: Item, plan_: Plan, home: Home, state: Callable[[], State]) -> str:
    """Why it stays; "" if it is gone."""
    found = item.found
    trash = found.path.with_name(f"{TRASH_PREFIX}{found.path.name.lstrip('.')[:80]}-{uuid.uuid4().hex[:8]}")
    with _held(found, home) as ours:
        if not ours:
            return "somebody is writing it"
        now = _find(found.what, found.path)
        if now is None:
            return "it is gone already"
        if now.touched_at != found.touched_at:
            return "somebody has used it since the plan was made"
        if found.what == "signature" and _signed_by(found.path).exists():
            return "the folder that it signs has come"
        # First out of everybody's sight, then looked at again: whoever comes between finds nothing and copies anew.
        found.path.rename(trash)
        if not _still_free(item, plan_, home, state()):
            trash.rename(found.path)
            return "something needs it since the plan was made"
        if found.what in ("version", "cached adapter"):
            # After its folder: a folder without a signature could not be told from one that lost it.
            signature_path(found.path).unlink(missing_ok=True)
    if trash.is_dir():
        shutil.rmtree(trash)
    else:
        trash.unlink()
    return ""


def _remove_remote(item: Item, plan_: Plan, home: Home, state: Callable[[], State]) -> str:
    """As `_remove`, where nothing can be put aside: its marker goes first, and from then on it is nobody's."""
    run_id, name = item.found.path.parts
    storage = storage_at(home.runs / run_id, run_id, item.found.uri.removesuffix(f"/{run_id}/{name}"))
    if name not in storage.listing():
        return "it is gone already"
    if not _still_free(item, plan_, home, state()):
        return "something needs it since the plan was made"
    storage.remove(name)
    return ""


def _still_free(item: Item, plan_: Plan, home: Home, state: State) -> bool:
    again = plan(state, (item.found,), home, now=plan_.now, grace=plan_.grace, loaded=plan_.loaded)
    return bool(again.free)


@contextmanager
def _held(found: Found, home: Home) -> Iterator[bool]:
    """Whether nobody else can publish, write or delete it now, for as long as the block runs."""
    if found.what == "upload":
        with unclaimed(found.path) as ours:
            yield ours
    elif found.path.is_relative_to(home.versions) or found.path.is_relative_to(home.adapter_cache):
        with only_one(found.path.parent / LOCK), _abandoned(found) as ours:
            yield ours
    else:
        with _abandoned(found) as ours:
            yield ours


def _abandoned(found: Found) -> AbstractContextManager[bool]:
    return abandoned(found.path) if found.what == "scratch" else nullcontext(True)
