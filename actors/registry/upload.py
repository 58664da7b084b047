"""How gigabytes get into the version store: in parts, hashed while they are written, signed, then visible at once.

The process that has the files copies them itself, because storage is shared: nothing goes through a request, so
nothing can time out. Under `versions/<name>/` there is

    <12 digits of the digest>/       a version's files and its card, whole and for ever
    <12 digits of the digest>.sig    its signature
    .partial-upload-<id>/            a copy on its way: `files/`, and `journal`, which says how far it is
    .lock                            held while a folder appears, an upload begins, or either is taken away by `gc`

The id is made from the source, so whoever stages the same again after a crash goes on at the last whole part. A part
is in the journal once it is on the disk and hashed. The signature is in place before its folder is: whoever dies
leaves either no version or a whole signed one.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from actors.registry.artifacts import SourceFile, inspect, open_plainly, require_name, stamp_of, survey
from actors.registry.card import CARD_FILE, Card, describe, dtype_of, encode
from actors.registry.facts import Artifact, VersionFact
from cluster import signing
from cluster.errors import CapacityError, ConfigError, DependencyError
from cluster.progress import Progress, Sink, silent
from cluster.storage import DISK_FULL, LOCK, PARTIAL_PREFIX, Home, digest_of, file_digests, is_still, only_one

UPLOAD_PREFIX: Final = f"{PARTIAL_PREFIX}upload-"
FOLDER_DIGITS: Final = 12
PART_BYTES: Final = 64 << 20
"""After so many bytes a killed copy can go on; also how far the disk may be behind."""
_STEP_BYTES: Final = 8 << 20
_READ_BYTES: Final = 1 << 20
"""Small enough to stay in a core's cache between the copy out of the kernel and the hash."""
_HASHERS: Final = max(2, min(4, os.cpu_count() or 1))
_FILES_AT_ONCE: Final = 2 * _HASHERS
_SPARE_BYTES: Final = 16 << 20
_REPORT_EVERY_S: Final = 0.25
_NO_SUCH_CALL: Final = frozenset({errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM})
_JOURNAL: Final = "journal"
_FILES: Final = "files"

_logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Staged:
    """A version's files in the version store, whole and signed, and its card. `folder` is absolute."""

    artifact: Artifact
    card: Card
    folder: Path


def admit(fact: VersionFact, home: Home, sink: Sink = silent, *, recipe: dict[str, Any] | None = None) -> Artifact:
    """`stage` the folder of which `fact` tells, with the card that comes of it; the recipe is not among its facts."""
    card = describe(
        fact.source_path,
        kind=fact.kind,
        base=fact.base,
        base_digest=fact.base_digest,
        tokenizer_digest=fact.tokenizer_digest,
        licence=fact.licence,
        recipe=recipe,
        recipe_digest=fact.recipe_digest,
        lock_digest=fact.lock_digest,
        code_commit=fact.code_commit,
        run_id=fact.run_id,
        checkpoint_id=fact.checkpoint_id,
        data_version=fact.data_version,
    )
    return stage(fact.source_path, card, home, fact.name, sink).artifact


def stage(source: Path, card: Card, home: Home, name: str, sink: Sink = silent) -> Staged:
    """Copy the folder `source`, of which `card` tells, into the version store; what lies there already is used.

    Safe to repeat, after a crash too, and to run twice at once: one copies, the other waits for it. `sink` hears of
    the bytes. Raises `ConfigError` for a folder that may not be a version or changes meanwhile, `CapacityError` if
    the disk is full (what has been copied stays, and the next call goes on from there), `DependencyError` if files
    cannot be read or written, or a version in the store has been tampered with.
    """
    source = source.absolute()
    store = home.versions / require_name(name)
    inspection = inspect(source, card.kind)
    if (card.adapter, card.dtype) != (inspection.adapter, dtype_of(inspection)):
        raise _changed(source)
    content = encode(card)
    with translated(source, home.versions):
        store.mkdir(parents=True, exist_ok=True)
        with claim(store / f"{UPLOAD_PREFIX}{_upload_id(source, content, name, inspection.files)}") as upload:
            assert upload is not None
            published = _adopted(store, source, content, inspection.files, home, what=f"{card.kind} {name}")
            if published is None:
                try:
                    digests = _copied(upload, inspection.files, sink)
                    if survey(source) != inspection.files:
                        raise _SourceChanged(source)
                except _SourceChanged:
                    _discard(upload)
                    raise _changed(source) from None
                published = finish(upload.files, digests, card, store, home)
            _discard(upload)
    return staged(name, card, inspection.size_bytes + len(content), published, home)


def staged(name: str, card: Card, size_bytes: int, published: tuple[str, str], home: Home) -> Staged:
    """What `published` (a digest, and the key that signed it) is for the registry; `size_bytes` counts the card."""
    digest, signed_by = published
    path = Path(name) / digest[:FOLDER_DIGITS]
    artifact = Artifact(
        path=path,
        digest=digest,
        signed_by=signed_by,
        size_bytes=size_bytes,
        adapter=card.adapter,
        dtype=card.dtype,
        licence=card.licence,
        chat_template_digest=card.chat_template_digest or None,
    )
    return Staged(artifact, card, home.versions / path)


def finish(files: Path, digests: Mapping[str, str], card: Card, store: Path, home: Home) -> tuple[str, str]:
    """Put the card to `files`, which have these `digests`, sign them, and publish them; digest and signer."""
    content = encode(card)
    _write(files / CARD_FILE, content)
    digests = {**digests, CARD_FILE: hashlib.sha256(content).hexdigest()}
    return digest_of(digests), publish_verified(files, digests, card, store, home)


def publish_verified(
    files: Path,
    digests: Mapping[str, str],
    card: Card,
    store: Path,
    home: Home,
    *,
    signature: Path | None = None,
    signed_by: str = "",
) -> str:
    """`put`, if `files` are what the door lets in and what their card says; returns the signer.

    They are looked through here, though they may have been before: nobody else changes a copy between this look and
    its publication.
    """
    copied = inspect(files, card.kind, carded=True)
    if (copied.adapter, dtype_of(copied)) != (card.adapter, card.dtype):
        raise ConfigError(f"{files} is not what its {CARD_FILE} says.", hint="Register a folder that nobody writes to.")
    _sync_folders(files)
    return put(files, store, digests, home, what=f"{card.kind} {store.name}", signature=signature, signed_by=signed_by)


def put(
    files: Path,
    store: Path,
    digests: Mapping[str, str],
    home: Home,
    *,
    what: str,
    signature: Path | None = None,
    signed_by: str = "",
) -> str:
    """Make the folder `files` the version's of its digest in `store`; returns the id of the key that signed it.

    `files` lies in an upload's folder and is durable. `signature`: one that has been verified, of the key `signed_by`;
    without it we sign. A version that is there already stays, and is verified.
    """
    digest = digest_of(digests)
    target = store / digest[:FOLDER_DIGITS]
    if signature is None:
        signature = files.with_name(target.name + signing.SIGNATURE_SUFFIX)
        signed_by = signing.sign(files, home, digests, signature=signature)
    while True:
        with only_one(store / LOCK):
            if not target.is_dir():
                signature.rename(signing.signature_path(target))
                # Durable in this order too: after a power cut there is no folder without its signature.
                _sync(store)
                files.rename(target)
                # `gc` spares what is young: between here and the registry's own record nothing points to the folder.
                os.utime(target)
                _sync(store)
                return signed_by
        try:
            return adopt(target, digest, home, what=what)
        except Freed:
            continue


class Freed(Exception):
    """A collection has taken a version away while it was looked at."""


def adopt(target: Path, digest: str, home: Home, *, what: str) -> str:
    """The key that signed the version at `target`, which must hold what `digest` says; it is signed if it was not.

    Raises `Freed` if it is not there, or not any more.
    """
    with only_one(target.parent / LOCK):
        if not target.is_dir():
            raise Freed
        os.utime(target)
        _sync(target.parent)
    with suppress(signing.SignatureError):
        return signing.verify(target, home, what=what, digest=digest)
    # A collection may have taken it away under our eyes, or put it back: now it cannot. That this keeps others
    # waiting for as long as the files are read is for damage only.
    with only_one(target.parent / LOCK):
        if not target.is_dir():
            raise Freed
        try:
            return signing.verify(target, home, what=what, digest=digest)
        except signing.SignatureError as error:
            # What we hold in our hands has this digest, so we may vouch for it, whoever's signature is missing or void.
            if error.reason == "changed" or digest_of(digests := file_digests(target)) != digest:
                raise DependencyError(
                    f"{target} does not hold what its name says: somebody changed it.",
                    hint="Move that folder away and register again; versions that point to it are damaged.",
                    retryable=False,
                ) from None
            return signing.sign(target, home, digests)


def plain_copy(source: Path, target: Path) -> None:
    """What `stage` is measured against: `shutil.copytree`, and every file durable."""
    shutil.copytree(source, target)
    for path in (*target.rglob("*"), target):
        _sync(path)


@dataclass
class Upload:
    """A folder of one copy on its way, held by us. `marks` maps a file to how far it is: bytes, digest up to there."""

    folder: Path
    journal: int
    marks: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def files(self) -> Path:
        """What becomes the version's folder."""
        return self.folder / _FILES


@contextmanager
def claim(folder: Path, *, patient: bool = True) -> Iterator[Upload | None]:
    """Hold an upload's folder, made if it is missing; the kernel lets go of it when its holder dies.

    Not `patient`: None if there is none, or somebody holds it.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    with ExitStack() as held:
        while True:
            if patient:
                # Whoever holds this sees no upload's folder that has no journal only because it is just being made.
                with only_one(folder.parent / LOCK):
                    folder.mkdir(exist_ok=True)
                    journal = os.open(folder / _JOURNAL, flags | os.O_CREAT, 0o600)
            else:
                try:
                    journal = os.open(folder / _JOURNAL, flags)
                except FileNotFoundError:
                    yield None
                    return
            descriptor = held.enter_context(os.fdopen(journal, "r+b", buffering=0))
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if patient else fcntl.LOCK_NB))
            except BlockingIOError:
                yield None
                return
            # The one who held it has finished, or `gc` was quicker, if another file has that name now, or none.
            if is_still(journal, folder / _JOURNAL):
                break
            held.close()
        yield Upload(folder, journal, _read_marks(descriptor.read()))


def _discard(upload: Upload) -> None:
    """Delete an upload's folder, the journal last: until then whoever stages the same waits, and then begins anew."""
    for path in upload.folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != _JOURNAL:
            path.unlink(missing_ok=True)
    with only_one(upload.folder.parent / LOCK):
        shutil.rmtree(upload.folder, ignore_errors=True)


@contextmanager
def unclaimed(folder: Path) -> Iterator[bool]:
    """Whether nobody holds an upload's folder, nor can begin to while the block runs."""
    with only_one(folder.parent / LOCK):
        if (folder / _JOURNAL).exists():
            with claim(folder, patient=False) as upload:
                yield upload is not None
        else:
            yield True


def _read_marks(text: bytes) -> dict[str, tuple[int, str]]:
    marks: dict[str, tuple[int, str]] = {}
    for line in text.splitlines():
        try:
            name, done, running = json.loads(line)
            marks[name] = (int(done), str(running))
        except (ValueError, TypeError):
            continue  # the last line of one who was killed while writing it
    return marks


def _upload_id(source: Path, content: bytes, name: str, files: tuple[SourceFile, ...]) -> str:
    stamps = [(file.name, file.stamp) for file in files]
    facts = json.dumps([str(source), name, hashlib.sha256(content).hexdigest(), stamps])
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def _adopted(
    store: Path, source: Path, content: bytes, files: tuple[SourceFile, ...], home: Home, *, what: str
) -> tuple[str, str] | None:
    """Digest and signer of a version in `store` with the same content: found by card and sizes, told by every byte.

    A caller whose answer was lost asks again; it need not have room for a second copy.
    """
    sizes = {file.name: file.size for file in files} | {CARD_FILE: len(content)}
    alike = {
        folder.name
        for folder in store.iterdir()
        if not folder.name.startswith(".") and folder.is_dir() and _looks_like(folder, sizes, content)
    }
    if not alike:
        return None
    digest = digest_of(file_digests(source) | {CARD_FILE: hashlib.sha256(content).hexdigest()})
    if survey(source) != files:
        raise _changed(source)
    if digest[:FOLDER_DIGITS] not in alike:
        return None
    try:
        return digest, adopt(store / digest[:FOLDER_DIGITS], digest, home, what=what)
    except Freed:
        return None


def _looks_like(folder: Path, sizes: Mapping[str, int], content: bytes) -> bool:
    try:
        if any((folder / name).stat().st_size != size for name, size in sizes.items()):
            return False
        return (folder / CARD_FILE).read_bytes() == content
    except OSError:
        return False


def _copied(upload: Upload, files: tuple[SourceFile, ...], sink: Sink) -> dict[str, str]:
    """SHA-256 by name of `files`, all of which lie in `upload.files` then, durably."""
    try:
        return _Copy(upload, files, sink).run()
    except _Damaged as damage:
        _logger.warning("%s was touched since it was copied; its copy begins anew", damage)
        shutil.rmtree(upload.files, ignore_errors=True)
        os.ftruncate(upload.journal, 0)
        upload.marks.clear()
        return _Copy(upload, files, sink).run()


class _Damaged(Exception):
    """What lies in an upload's folder is not what its journal says."""


class _SourceChanged(Exception):
    """A file of the source is not the one that was looked at."""


@dataclass
class _OpenFile:
    """One file of the copy. `steps` says how far it has been written; None: there comes no more."""

    file: SourceFile
    target: FileIO
    kept: int
    steps: SimpleQueue[int | None] = field(default_factory=SimpleQueue)
    syncs: list[Future[Any]] = field(default_factory=list)

    @property
    def descriptor(self) -> int:
        return self.target.fileno()


class _Copy:
    """One pass over the files: this thread copies, others hash what was written, one makes it durable.

    The bytes are moved by the kernel, and hashed as they lie in the copy, where they are still in memory: the digest
    is of what is there, and the source is read once.
    """

    def __init__(self, upload: Upload, files: tuple[SourceFile, ...], sink: Sink) -> None:
        self._upload = upload
        self._files = files
        self._sink = sink
        self._kept = {file.name: self._whole_parts(file) for file in files}
        self._hashed = 0
        self._counting = threading.Lock()
        self._began = self._reported = time.monotonic()
        self._hashers = ThreadPoolExecutor(_HASHERS, thread_name_prefix="upload-hash")
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="upload-sync")

    def run(self) -> dict[str, str]:
        missing = sum(file.size - self._kept[file.name] for file in self._files)
        free = shutil.disk_usage(self._upload.folder).free
        if free < missing + _SPARE_BYTES:
            raise OSError(errno.ENOSPC, f"{missing >> 20} MiB are to be copied, {free >> 20} MiB are free")
        digests: dict[str, str] = {}
        flying: deque[tuple[_OpenFile, Future[str]]] = deque()
        # Left in reverse order: nobody may use a descriptor any more when it is closed.
        with ExitStack() as descriptors, self._syncer, self._hashers:
            try:
                for file in self._files:
                    one = self._open(file, descriptors)
                    flying.append((one, self._hashers.submit(self._hash, one)))
                    self._write(one)
                    while len(flying) > _FILES_AT_ONCE:
                        digests |= self._finish(*flying.popleft())
                while flying:
                    digests |= self._finish(*flying.popleft())
            finally:
                for one, _ in flying:
                    one.steps.put(None)
        self._report(0)
        return digests

    def _whole_parts(self, file: SourceFile) -> int:
        done, _ = self._upload.marks.get(file.name, (0, ""))
        try:
            return done if done <= min(file.size, (self._upload.files / file.name).lstat().st_size) else 0
        except OSError:
            return 0

    def _open(self, file: SourceFile, descriptors: ExitStack) -> _OpenFile:
        target = self._upload.files / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        # Closing it twice is harmless for an object, not for a number, which may be another file's by then.
        target_file = descriptors.enter_context(os.fdopen(descriptor, "r+b", buffering=0))
        target_file.truncate(self._kept[file.name])
        return _OpenFile(file, target_file, self._kept[file.name])

    def _write(self, one: _OpenFile) -> None:
        try:
            with open_plainly(one.file.path) as source:
                self._require_same(one, source.fileno())
                at = one.kept
                while at < one.file.size:
                    end = min(one.file.size, at + _STEP_BYTES, (at // PART_BYTES + 1) * PART_BYTES)
                    while at < end:
                        moved = _move(source.fileno(), one.descriptor, at, end - at)
                        if not moved:
                            raise _SourceChanged(one.file.name)
                        at += moved
                    one.steps.put(at)
                    if at % PART_BYTES == 0 and at < one.file.size:
                        # The disk starts now, not when everything has been copied.
                        one.syncs.append(self._syncer.submit(os.fdatasync, one.descriptor))
                    self._report(_REPORT_EVERY_S)
                self._require_same(one, source.fileno())
        except FileNotFoundError:
            raise _SourceChanged(one.file.name) from None
        one.steps.put(None)
        one.syncs.append(self._syncer.submit(os.fsync, one.descriptor))

    def _require_same(self, one: _OpenFile, descriptor: int) -> None:
        if stamp_of(os.fstat(descriptor)) != one.file.stamp:
            raise _SourceChanged(one.file.name)

    def _hash(self, one: _OpenFile) -> str:
        running = hashlib.sha256()
        buffer = memoryview(bytearray(_READ_BYTES))
        at = 0
        if one.kept:
            at = self._feed(running, one, buffer, 0, one.kept)
            if running.hexdigest() != self._upload.marks[one.file.name][1]:
                raise _Damaged(one.file.name)
        while (reached := one.steps.get()) is not None:
            at = self._feed(running, one, buffer, at, reached)
            if at % PART_BYTES == 0 or at == one.file.size:
                one.syncs.append(self._syncer.submit(self._mark, one, at, running.hexdigest()))
        return running.hexdigest()

    def _feed(self, running: "hashlib._Hash", one: _OpenFile, buffer: memoryview, at: int, end: int) -> int:
        while at < end:
            count = os.preadv(one.descriptor, [buffer[: min(end - at, _READ_BYTES)]], at)
            if not count:
                raise _Damaged(one.file.name)
            running.update(buffer[:count])
            at += count
            with self._counting:
                self._hashed += count
        return at

    def _mark(self, one: _OpenFile, done: int, running: str) -> None:
        os.fdatasync(one.descriptor)
        os.write(self._upload.journal, json.dumps([one.file.name, done, running]).encode() + b"\n")

    def _finish(self, one: _OpenFile, hashing: Future[str]) -> dict[str, str]:
        digest = self._wait(hashing)
        # Complete by now: who hashes has ended, and this thread has written the file.
        for sync in one.syncs:
            self._wait(sync)
        one.target.close()
        return {one.file.name: digest}

    def _wait(self, future: Future[_Result]) -> _Result:
        while not wait([future], timeout=_REPORT_EVERY_S).done:
            self._report(_REPORT_EVERY_S)
        return future.result()

    def _report(self, every_s: float) -> None:
        now = time.monotonic()
        if now - self._reported < every_s:
            return
        self._reported = now
        kept = sum(self._kept.values())
        self._sink(
            Progress(
                stage="copying",
                done=self._hashed,
                total=sum(file.size for file in self._files),
                unit="bytes",
                rate=max(0, self._hashed - kept) / max(now - self._began, 1e-9),
                rate_unit="bytes/s",
                note=f"went on after {kept} bytes" if kept else "",
            )
        )


def _move(source: int, target: int, at: int, count: int) -> int:
    """Copy up to `count` bytes at the offset `at`, in the kernel where it can; returns how many, 0 at the end."""
    try:
        return os.copy_file_range(source, target, count, at, at)
    except OSError as error:
        if error.errno not in _NO_SUCH_CALL:
            raise
    return os.pwrite(target, os.pread(source, min(count, _STEP_BYTES), at), at)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folders(folder: Path) -> None:
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        _sync(path)


def _sync(path: Path) -> None:
    """Make a file's bytes, or a folder's list of names, durable: a rename alone does not survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _changed(source: Path) -> ConfigError:
    return ConfigError(f"{source} changed while it was being copied.", hint="Register a folder that nobody writes to.")


@contextmanager
def translated(source: Path, target: Path) -> Iterator[None]:
    """Errors of the operating system, as a person can act on them."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise CapacityError(
                f"{target} has no room for {source}: {error.strerror}.",
                hint="Make room on that disk and do the same again: it goes on where it stopped. `flywheel models gc` "
                "frees what nothing needs, but has to write a little itself.",
            ) from None
        raise DependencyError(
            f"{source} cannot be brought into {target}: {error.strerror or error}"
            + (f" ({error.filename})." if error.filename else "."),
            hint="Check the disk and the permissions of both folders.",
            retryable=False,
        ) from None
