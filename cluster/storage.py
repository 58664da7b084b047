"""Where things lie under `FLYWHEEL_HOME`, content digests, and publishing a folder whole or not at all.

A folder that has been published under its final name is complete and never changes; whoever dies while
writing leaves only a `.partial-…` sibling, which nothing reads. Whoever lives holds a lock on theirs, so it can be
told from one that may be deleted, however old it is: see `abandoned`.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import unicodedata
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster import environment
from cluster.errors import ConfigError

PARTIAL_PREFIX = ".partial-"

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of the system that more room would mend."""

LOCK = ".lock"
"""In a folder of signed folders: held (`only_one`) while one of them and its signature appear, or are taken away."""

_HASHING_THREADS = max(2, min(4, os.cpu_count() or 1))
"""SHA-256 lets go of the GIL; beyond four threads a disk is what limits it."""


@dataclass(frozen=True)
class Home:
    """The folders of one installation. Each belongs to one owner, named in the comment."""

    root: Path

    @classmethod
    def current(cls) -> "Home":
        """The home that `FLYWHEEL_HOME` names (default `~/.flywheel`); `ConfigError` if it cannot be written."""
        return cls(environment.require_usable(environment.home()))

    @property
    def models(self) -> Path:  # cluster.models: base weights as Hugging Face folders
        return self.root / "models"

    @property
    def data(self) -> Path:  # actors.data: immutable data versions
        return self.root / "data"

    @property
    def runs(self) -> Path:  # actors.training: checkpoints of runs
        return self.root / "runs"

    @property
    def evaluations(self) -> Path:  # actors.evaluation: every answer of every evaluation
        return self.root / "evaluations"

    @property
    def versions(self) -> Path:  # actors.registry: artifacts of registered versions
        return self.root / "versions"

    @property
    def keys(self) -> Path:  # cluster.signing: our private key, and the public keys that are trusted
        return self.root / "keys"

    @property
    def registry_database(self) -> Path:  # actors.registry
        return self.root / "registry.db"

    @property
    def tracking_database(self) -> Path:  # cluster.tracking: MLflow's own tables
        return self.root / "mlflow.db"

    @property
    def tracking_artifacts(self) -> Path:  # cluster.tracking
        return self.root / "mlflow-artifacts"

    @property
    def vectors(self) -> Path:  # cluster.vectors: Milvus Lite's data folder
        return self.root / "vectors"

    @property
    def adapter_cache(self) -> Path:  # deployments.llm: node-local immutable copies of adapters
        return self.root / "cache" / "adapters"

    @property
    def logs(self) -> Path:
        return self.root / "logs"


def digest_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_folder(folder: Path) -> str:
    """SHA-256 over every file's relative name and digest, in sorted order; names and bytes both count."""
    return digest_of(file_digests(folder))


def digest_of(digests: Mapping[str, str]) -> str:
    """The digest of a folder whose files have these `file_digests`."""
    total = hashlib.sha256()
    # By component, as paths compare: `a/b` comes before `a.txt`.
    for name in sorted(digests, key=lambda name: name.split("/")):
        total.update(f"{name}\0{digests[name]}\n".encode())
    return total.hexdigest()


def file_digests(folder: Path) -> dict[str, str]:
    """SHA-256 (hex) of every file below `folder`, by its relative name with `/`; each byte is read once.

    Raises `ConfigError` if the folder holds anything but files and folders with names in UTF-8: what a symbolic
    link leads to is not part of the content. `OSError` if a file, or the folder, cannot be read.
    """
    names = sorted(_file_names(folder, ""))
    with ThreadPoolExecutor(_HASHING_THREADS, thread_name_prefix="digest") as pool:
        return dict(zip(names, pool.map(lambda name: digest_file(folder / name), names), strict=True))


def _file_names(folder: Path, prefix: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = prefix + entry.name
            if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in entry.name):
                # Bytes that are not UTF-8 come as surrogates and have no digest; a line break would forge log lines.
                raise ConfigError(f"{folder} holds a file with an unreadable name: {entry.name!r}.", hint="Rename it.")
            if entry.is_dir(follow_symlinks=False):
                yield from _file_names(Path(entry.path), f"{name}/")
            elif entry.is_file(follow_symlinks=False):
                yield name
            else:
                kind = "a symbolic link" if entry.is_symlink() else "no ordinary file"
                raise ConfigError(
                    f"{name} in {folder} is {kind}; only files have a digest.",
                    hint="Copy the folder with its links followed: cp -rL FOLDER COPY.",
                )


@contextmanager
def publish(target: Path) -> Iterator[Path]:
    """A scratch folder that becomes `target` when the block ends well, and vanishes when it does not.

    If another process has published `target` meanwhile, its copy stays and ours is dropped: both were
    made from the same content by construction (targets are named by digest or by a unique id).
    """
    with passing_folder(target) as scratch:
        yield scratch
        sync_tree(scratch)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():
                raise
        sync(target.parent)


@contextmanager
def passing_folder(target: Path) -> Iterator[Path]:
    """A new `.partial-…` sibling of `target` that is there, and not `abandoned`, for as long as the block runs."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _scratch(target, _make_folder) as (scratch, _):
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def write_atomically(path: Path, content: str, *, mode: int = 0o666) -> None:
    """Replace `path` in one step, durably: readers see the old text or the new, never a part.

    `mode` holds from the first moment, less what the umask takes: 0o600 is for secrets.
    """
    path.parent.mkdir(parents=True, exist_ok=True)

    def make(scratch: Path) -> int:
        return os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)

    with _scratch(path, make) as (scratch, descriptor):
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", closefd=False) as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            scratch.replace(path)
            sync(path.parent)
        finally:
            scratch.unlink(missing_ok=True)


@contextmanager
def abandoned(scratch: Path) -> Iterator[bool]:
    """Whether nobody writes to a `.partial-…` of `publish` or `write_atomically` any more, nor will.

    If so, it may be deleted or renamed in the block. What is gone is abandoned.
    """
    # LOCK_EX on a file in NFS wants it open for writing; a folder cannot be.
    flags = os.O_RDONLY if scratch.is_dir() else os.O_RDWR
    try:
        descriptor = os.open(scratch, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        yield True
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


@contextmanager
def _scratch(target: Path, make: Callable[[Path], int | None]) -> Iterator[tuple[Path, int]]:
    """A new `.partial-…` sibling of `target`, made and opened by `make`, and locked until the block ends."""
    while True:
        scratch = target.with_name(f"{PARTIAL_PREFIX}{target.name}-{uuid.uuid4().hex[:8]}")
        descriptor = make(scratch)
        if descriptor is None:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Between its making and its lock it looked abandoned, and may have been taken away.
            if is_still(descriptor, scratch):
                yield scratch, descriptor
                return
        finally:
            os.close(descriptor)


def _make_folder(scratch: Path) -> int | None:
    scratch.mkdir()
    try:
        return os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None  # taken away already


def is_still(descriptor: int, path: Path) -> bool:
    """Whether what is open as `descriptor` is what lies at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Held by one process of this machine at a time; the kernel lets go of it when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def require_file_name(name: str, *, what: str) -> str:
    """`name`, if it can be one path component; `ConfigError` otherwise. Ids pass here before they touch a path."""
    allowed = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    if not name or len(name) > 128 or not set(name) <= allowed or name.startswith(".") or ".." in name:
        raise ConfigError(
            f"{name!r} cannot be a {what}.",
            hint="Use 1 to 128 letters, digits, '.', '_' or '-', not starting with '.'.",
        )
    return name


def sync_tree(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        sync(path)


def sync(path: Path) -> None:
    """Make a file's bytes, or a folder's list of names, durable: a rename alone does not survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
