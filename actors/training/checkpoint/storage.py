"""Where a run's checkpoints lie: a folder that all workers see, or `s3://bucket/prefix`.

A checkpoint is a folder of files under one name. It is written into a scratch folder on this machine, stored, and
sealed: only what is sealed counts. In a folder, the scratch is a `.partial-…` sibling and sealing is one rename. In
S3, the scratch is local, storing is an upload, and sealing is the last object. This module knows no torch and does not
know what is in the files.
"""

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential

from cluster import environment
from cluster.errors import ConfigError, DependencyError
from cluster.storage import (
    PARTIAL_PREFIX,
    Home,
    abandoned,
    digest_file,
    passing_folder,
    require_file_name,
    sync,
    sync_tree,
    write_atomically,
)

MARKER: Final = "COMMITTED"
DAMAGED: Final = "DAMAGED"
"""Beside the files of a checkpoint whose marker was taken away."""
S3: Final = "s3://"

_TRASH: Final = f"{PARTIAL_PREFIX}trash-"
"""As the registry's garbage collection names it, which clears what a dead process leaves."""
_NAME: Final = re.compile(r"step-[0-9]+")
_PARTIAL: Final = re.compile(rf"{re.escape(PARTIAL_PREFIX)}(step-[0-9]+)-[0-9a-f]+")
_CHUNK: Final = 8 << 20
_PATIENCE_S: Final = 30.0
"""How long a request to S3 is made again. The last one may begin then, and take twice `_ANSWER_S`."""
_ANSWER_S: Final = 10.0
"""How long S3 may be silent, in each of the client's two tries: training waits for the save before."""
_REFUSED: Final = re.compile(
    r"AWS Error (ACCESS_DENIED|NO_SUCH_BUCKET|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|EXPIRED_TOKEN|"
    r"INVALID_CLIENT_TOKEN_ID|UNRECOGNIZED_CLIENT|MISSING_AUTHENTICATION_TOKEN)"
)
"""Answers that will be the same in a minute."""

_Result = TypeVar("_Result")


class RunStorage(Protocol):
    """One run's checkpoints. Names are those of checkpoints, files are names inside one, with `/`.

    `OSError` where the disk fails; `DependencyError` where a remote store does, after a bounded number of tries.
    """

    @property
    def uri(self) -> str:
        """The run's folder, as a path or URI."""
        ...

    @property
    def durable(self) -> bool:
        """Whether what is written into a scratch folder is the checkpoint itself, and so must be synced."""
        ...

    def listing(self) -> dict[str, dict[str, int]]:
        """Every checkpoint, also half-written ones, with its files and their sizes in bytes.

        Only what can be opened as a file is listed: no folder, link to nowhere, or pipe that stands in for one.
        """
        ...

    def read(self, name: str, file: str) -> bytes:
        """A small file's bytes; `FileNotFoundError` if it is not there."""
        ...

    def digest(self, name: str, file: str) -> str:
        """SHA-256 of a file's bytes, in hex; `FileNotFoundError` if it is not there."""
        ...

    def opened(self, name: str, scratch: Path | None = None) -> AbstractContextManager[Callable[[Iterable[str]], Path]]:
        """Called with names of files, what this gives brings them to this machine and returns the folder they are in.

        With `scratch`, where the checkpoint is being written, those count too that are there and not yet sealed.
        """
        ...

    def scratch(self, name: str, token: str, rank: int) -> Path:
        """Where `rank` writes its files of a new checkpoint; `token` is the same on every rank and never used twice."""
        ...

    def store(self, scratch: Path, name: str, files: Iterable[str]) -> None:
        """Put `files` of a scratch folder where `seal` wants them."""
        ...

    def seal(self, scratch: Path, name: str, marker: str) -> None:
        """Make a checkpoint whose files are all stored count, in one step that survives a power cut."""
        ...

    def discard(self, scratch: Path, name: str, rank: int) -> None:
        """Remove what `rank` has written of a checkpoint that was not sealed; every rank calls it."""
        ...

    def remove(self, name: str) -> None:
        """Delete a checkpoint. Whoever dies in here leaves none that counts."""
        ...

    def condemn(self, name: str, why: str) -> None:
        """Make a checkpoint that turned out to be damaged count no more. Its files stay for whoever looks into it."""
        ...

    def clear(self) -> None:
        """Delete what dead processes have left half-written. Nobody may be writing now."""
        ...

    def free_bytes(self) -> int | None:
        """Room that is left; None where that is not known."""
        ...

    def require_writable(self) -> None:
        """Raise now what would keep every checkpoint from being saved, by writing a file and deleting it."""
        ...


def open_storage(home: Home, run_id: str, where: str | None = None) -> RunStorage:
    """The storage of a run: `where` is `checkpoint.storage` of its recipe."""
    return storage_at(home.runs / require_file_name(run_id, what="run id"), run_id, where)


def storage_at(run_folder: Path, run_id: str, where: str | None = None) -> RunStorage:
    """As `open_storage`, for a run whose own folder, where its checkpoints lie by default, is known."""
    if where is None:
        return FolderStorage(run_folder)
    if where.startswith(S3):
        return S3Storage(f"{where.rstrip('/')}/{run_id}", run_folder)
    if "://" in where:
        raise ConfigError(
            f"checkpoint.storage {where!r} is neither a folder nor s3://bucket/prefix.",
            hint="Give a path that all workers see, s3://bucket/prefix, or leave it out.",
        )
    return FolderStorage(Path(where).expanduser().absolute() / run_id)


class FolderStorage:
    """Checkpoints in a folder that every worker sees under this path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uri = str(folder)
        self.durable = True

    def listing(self) -> dict[str, dict[str, int]]:
        try:
            names = sorted(path.name for path in self.folder.iterdir())
        except FileNotFoundError:
            return {}
        return {name: _sizes(self.folder / name) for name in names if _NAME.fullmatch(name) or _PARTIAL.fullmatch(name)}

    def read(self, name: str, file: str) -> bytes:
        return (self.folder / name / file).read_bytes()

    def digest(self, name: str, file: str) -> str:
        return digest_file(self.folder / name / file)

    @contextmanager
    def opened(self, name: str, scratch: Path | None = None) -> Iterator[Callable[[Iterable[str]], Path]]:
        yield lambda _: scratch or self.folder / name

    def scratch(self, name: str, token: str, rank: int) -> Path:  # noqa: ARG002 (S3 needs them)
        folder = self.folder / f"{PARTIAL_PREFIX}{name}-{token}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def store(self, scratch: Path, name: str, files: Iterable[str]) -> None:
        pass

    def seal(self, scratch: Path, name: str, marker: str) -> None:
        write_atomically(scratch / MARKER, marker)
        sync_tree(scratch)
        scratch.rename(self.folder / name)
        sync(self.folder)

    def discard(self, scratch: Path, name: str, rank: int) -> None:  # noqa: ARG002 (S3 needs them)
        shutil.rmtree(scratch, ignore_errors=True)

    def remove(self, name: str) -> None:
        trash = self.folder / f"{_TRASH}{name}-{os.urandom(4).hex()}"
        (self.folder / name).rename(trash)  # out of everybody's sight in one step
        _delete(trash)

    def condemn(self, name: str, why: str) -> None:
        write_atomically(self.folder / name / DAMAGED, why)
        (self.folder / name / MARKER).unlink(missing_ok=True)

    def clear(self) -> None:
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if not (_PARTIAL.fullmatch(path.name) or path.name.startswith(_TRASH)):
                continue
            with suppress(OSError):
                if path.is_symlink():
                    _delete(path)
                    continue
                with abandoned(path) as ours:  # else somebody reads a checkpoint that lies in S3
                    if ours:
                        _delete(path)

    def free_bytes(self) -> int | None:
        self.folder.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(self.folder).free

    def require_writable(self) -> None:
        probe = self.folder / f"{PARTIAL_PREFIX}probe-{os.urandom(4).hex()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"No checkpoint can be saved in {self.uri}: {error.strerror or error}.",
                hint="Make the folder writable, or set checkpoint.storage to another one.",
            ) from None


class S3Storage:
    """Checkpoints under `s3://bucket/prefix`; what is being written or read passes through `scratch_root`.

    Credentials, region and `AWS_ENDPOINT_URL` come from the environment, as for every AWS client.
    """

    def __init__(self, uri: str, scratch_root: Path) -> None:
        self.uri = uri
        self.durable = False
        self._scratch_root = scratch_root
        self._opened: tuple[Any, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}  # a client is its process's own

    def listing(self) -> dict[str, dict[str, int]]:
        from pyarrow.fs import FileSelector, FileType

        def list_all() -> dict[str, dict[str, int]]:
            found: dict[str, dict[str, int]] = {}
            with self._client() as (client, root):
                for each in client.get_file_info(FileSelector(root, recursive=True, allow_not_found=True)):
                    name, slash, file = each.path.removeprefix(f"{root}/").partition("/")
                    if each.type == FileType.File and slash and _NAME.fullmatch(name):
                        found.setdefault(name, {})[file] = each.size
            return dict(sorted(found.items()))

        return self._tried(list_all)

    def read(self, name: str, file: str) -> bytes:
        def read() -> bytes:
            with self._client() as (client, root), client.open_input_stream(f"{root}/{name}/{file}") as stream:
                return bytes(stream.read())

        return self._tried(read)

    def digest(self, name: str, file: str) -> str:
        def digest() -> str:
            total = hashlib.sha256()
            with self._client() as (client, root), client.open_input_stream(f"{root}/{name}/{file}") as stream:
                while chunk := stream.read(_CHUNK):
                    total.update(chunk)
            return total.hexdigest()

        return self._tried(digest)

    @contextmanager
    def opened(self, name: str, scratch: Path | None = None) -> Iterator[Callable[[Iterable[str]], Path]]:
        # A run that starts now clears what nobody holds.
        held = nullcontext(scratch) if scratch is not None else passing_folder(self._scratch_root / name)
        with held as folder:

            def fetch(files: Iterable[str]) -> Path:
                for file in files:
                    if not (folder / file).exists():
                        self._tried(partial(self._download, name, file, folder / file))
                return folder

            yield fetch

    def scratch(self, name: str, token: str, rank: int) -> Path:
        folder = self._scratch_root / f"{PARTIAL_PREFIX}{name}-{token}{rank:04x}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def store(self, scratch: Path, name: str, files: Iterable[str]) -> None:
        for file in files:
            self._tried(partial(self._upload, scratch / file, name, file))

    def seal(self, scratch: Path, name: str, marker: str) -> None:
        (scratch / MARKER).write_text(marker, encoding="utf-8")
        self.store(scratch, name, [MARKER])

    def discard(self, scratch: Path, name: str, rank: int) -> None:
        shutil.rmtree(scratch, ignore_errors=True)
        if rank != 0:
            return
        with suppress(DependencyError):  # without a marker it counts for nobody, and `clear` comes by again
            if MARKER not in self.listing().get(name, {MARKER: 0}):
                self.remove(name)

    def remove(self, name: str) -> None:
        def remove() -> None:
            with self._client() as (client, root):
                with suppress(FileNotFoundError):
                    client.delete_file(f"{root}/{name}/{MARKER}")  # from here on it is nobody's checkpoint
                client.delete_dir(f"{root}/{name}")

        self._tried(remove)

    def condemn(self, name: str, why: str) -> None:
        def condemn() -> None:
            with self._client() as (client, root):
                with client.open_output_stream(f"{root}/{name}/{DAMAGED}") as writing:
                    writing.write(why.encode())
                with suppress(FileNotFoundError):
                    client.delete_file(f"{root}/{name}/{MARKER}")

        self._tried(condemn)

    def clear(self) -> None:
        FolderStorage(self._scratch_root).clear()
        for name, files in self.listing().items():
            if not files.keys() & {MARKER, DAMAGED}:
                self.remove(name)

    def free_bytes(self) -> int | None:
        return FolderStorage(self._scratch_root).free_bytes()

    def require_writable(self) -> None:
        FolderStorage(self._scratch_root).require_writable()

        def probe() -> None:
            with self._client() as (client, root):
                # Listing says nothing: a bucket that is not there lists as empty.
                with client.open_output_stream(f"{root}/.probe") as writing:
                    writing.write(b"")
                client.delete_file(f"{root}/.probe")

        self._tried(probe)

    def _upload(self, source: Path, name: str, file: str) -> None:
        # An object appears whole when its stream is closed, or not at all.
        with (
            source.open("rb") as reading,
            self._client() as (client, root),
            client.open_output_stream(f"{root}/{name}/{file}") as writing,
        ):
            while chunk := reading.read(_CHUNK):
                writing.write(chunk)

    def _download(self, name: str, file: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        half = target.with_name(f"{PARTIAL_PREFIX}{target.name}")
        with (
            self._client() as (client, root),
            client.open_input_stream(f"{root}/{name}/{file}") as reading,
            half.open("wb") as writing,
        ):
            while chunk := reading.read(_CHUNK):
                writing.write(chunk)
        half.rename(target)

    @contextmanager
    def _client(self) -> Iterator[tuple[Any, str]]:
        """The S3 client and the run's prefix in it."""
        if self._opened is None:
            from pyarrow.fs import AwsStandardS3RetryStrategy, FileSystem, S3FileSystem

            try:
                found, root = FileSystem.from_uri(self.uri)  # which finds the region of the bucket
                client = S3FileSystem(
                    region=found.region or None,
                    endpoint_override=environment.s3_endpoint(),
                    connect_timeout=_ANSWER_S,
                    request_timeout=_ANSWER_S,
                    retry_strategy=AwsStandardS3RetryStrategy(max_attempts=2),
                )
            except (OSError, ValueError) as error:
                raise self._away(error) from None
            self._opened = client, root
        yield self._opened

    def _tried(self, work: Callable[[], _Result]) -> _Result:
        """`work()`, tried for a while: what S3 answers with an error now it may grant in a second."""
        tries = Retrying(
            stop=stop_after_delay(_PATIENCE_S),
            wait=wait_exponential(0.2, max=5),
            retry=retry_if_exception(_passing),
            reraise=True,
        )
        try:
            return tries(work)
        except OSError as error:
            if not _remote(error):
                raise
            raise self._away(error) from None

    def _away(self, error: Exception) -> DependencyError:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return DependencyError(
            f"The checkpoints in {self.uri} cannot be reached: {reason}",
            hint="Check that the bucket exists and what AWS_ENDPOINT_URL, AWS_REGION and the credentials say here.",
        )


def _remote(error: BaseException) -> bool:
    """Whether S3 has said so: its errors have no number, the local disk's have."""
    return isinstance(error, OSError) and error.errno is None


def _passing(error: BaseException) -> bool:
    """Whether trying again may help."""
    return _remote(error) and not _REFUSED.search(str(error))


def _delete(path: Path) -> None:
    """A folder with all that is in it, or a file or a link that somebody has put where one was expected."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _sizes(folder: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    # A folder that may not be looked into is not an empty one: a run would begin again before what lies there.
    for root, _, files in os.walk(folder, onerror=_unless_gone):
        for file in files:
            path = Path(root, file)
            try:
                facts = path.stat()
            except OSError as error:
                _unless_gone(error)
            else:
                if stat.S_ISREG(facts.st_mode):
                    found[path.relative_to(folder).as_posix()] = facts.st_size
    return found


def _unless_gone(error: OSError) -> None:
    if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
        raise error
