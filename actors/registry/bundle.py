"""One version from one installation to another, as one file.

    bundle.json      what it is: id, digest, the files in order, and the facts of its lineage
    bundle.sig       the exporting installation's signature over bundle.json
    version.sig      the version's own signature
    keys/<id>.pem    public keys of both, to look at: they are not believed because they came along
    files/…          the version's files, sorted

It is a plain tar without compression, the same bytes whenever the same is exported (but for `bundle.sig`: elliptic
signatures are random). Reading one believes nothing that it says: members come in the order above or not at all, are
plain files, have names that stay in their folder and no more bytes than were announced; and nothing is visible in the
version store before both signatures have held with keys that are trusted here.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tarfile import BLOCKSIZE, PAX_FORMAT, TarError, TarInfo
from typing import Any, BinaryIO, Final, Literal

from pydantic import Field, ValidationError

from actors.registry import facts as registry_facts
from actors.registry.artifacts import open_plainly, require_name, require_path
from actors.registry.card import CARD_FILE, read
from actors.registry.facts import Event, Version
from actors.registry.upload import UPLOAD_PREFIX, Staged, claim, publish_verified, staged, translated
from cluster import signing
from cluster.config import Config
from cluster.errors import ConfigError, StateError
from cluster.progress import Progress, Sink, silent
from cluster.storage import PARTIAL_PREFIX, Home, digest_of

_MANIFEST: Final = "bundle.json"
_LARGEST_MANIFEST: Final = 64 << 20
_LARGEST_KEY: Final = 64 << 10
_MOST_KEYS: Final = 2
_LARGEST_FILE: Final = 1 << 42
_LONGEST_PAX: Final = 4096
_CHUNK: Final = 1 << 20


class _File(Config):
    name: str
    size_bytes: int = Field(ge=0, le=_LARGEST_FILE)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class _Event(Config):
    seq: int
    at: datetime
    by: str
    event: str
    fact: dict[str, Any]


class _Manifest(Config):
    """`bundle.json`. `signed_by` signed the version, `exported_by` this file; both are key ids."""

    format: Literal[1] = 1
    version_id: str
    name: str
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    signed_by: str = Field(pattern=r"^[0-9a-f]{16}$")
    exported_by: str = Field(pattern=r"^[0-9a-f]{16}$")
    exported_at: datetime
    files: tuple[_File, ...] = Field(max_length=10_000)
    events: tuple[_Event, ...]


@dataclass(frozen=True)
class Imported:
    """A version that came in: its files in the version store, and the facts of its lineage as they stand there."""

    staged: Staged
    version: Version
    events: tuple[Event, ...]
    signed_by: str
    exported_by: str
    exported_at: datetime


def export(
    version: Version, events: Sequence[Event], home: Home, target: Path, sink: Sink = silent, *, at: datetime
) -> Path:
    """Write `version` with its lineage (`events`, its own among them) to the new file `target`, whole or not at all.

    The version's files are verified first. Raises `SignatureError` if they do not hold, `ConfigError` if there is a
    file `target` already, `CapacityError` and `DependencyError` as `upload.stage`.
    """
    folder = home.versions / version.path
    if target.exists():
        raise ConfigError(f"{target} exists already.", hint="Choose another name, or take it away.")
    keyring = signing.Keyring(home)
    signed_by = signing.verify(folder, home, what=f"{version.kind} {version.id}", digest=version.digest)
    exported_by = keyring.ensure()
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    with translated(folder, target.parent), _scratch(target) as scratch:
        statement = scratch / "statement"
        statement.mkdir()
        digests = {name: _digest(folder / name) for name in names}
        manifest = _Manifest(
            version_id=version.id,
            name=version.name,
            digest=version.digest,
            signed_by=signed_by,
            exported_by=exported_by,
            exported_at=at.astimezone(UTC),
            files=tuple(
                _File(name=name, size_bytes=(folder / name).stat().st_size, sha256=digests[name]) for name in names
            ),
            events=tuple(
                _Event(
                    seq=event.seq,
                    at=event.at,
                    by=event.by,
                    event=event.fact.event,
                    fact=json.loads(registry_facts.encode(event.fact)),
                )
                for event in events
            ),
        )
        content = json.dumps(manifest.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()
        (statement / _MANIFEST).write_bytes(content)
        signing.sign(statement, home, {_MANIFEST: hashlib.sha256(content).hexdigest()})
        with (scratch / "bundle").open("wb") as out:
            writer = _Writer(out, sink, sum(file.size_bytes for file in manifest.files))
            writer.put(_MANIFEST, statement / _MANIFEST)
            writer.put("bundle.sig", signing.signature_path(statement))
            writer.put("version.sig", signing.signature_path(folder))
            for key in keyring.trusted():
                if key.id in (signed_by, exported_by):
                    writer.put(f"keys/{key.id}.pem", key.path)
            for name in names:
                writer.put(f"files/{name}", folder / name, counted=True)
            out.write(bytes(2 * BLOCKSIZE))
            out.flush()
            os.fsync(out.fileno())
        (scratch / "bundle").rename(target)
    return target


def bring_in(bundle: Path, home: Home, sink: Sink = silent) -> Imported:
    """Put the version in the file `bundle` into the version store; what lies there already is used.

    Nothing of it is recorded: that is the registry's part. Raises `SignatureError` for what no trusted key vouches
    for, `ConfigError` for a file that is no bundle or is damaged, `StateError` for facts of a newer Flywheel.
    """
    with translated(bundle, home.versions), _open(bundle) as file:
        reader = _Reader(file, bundle)
        return _bring_in(reader, home, sink)


def _bring_in(reader: "_Reader", home: Home, sink: Sink) -> Imported:
    content = reader.small(_MANIFEST, _LARGEST_MANIFEST)
    manifest = _parse(content, reader)
    store = home.versions / require_name(manifest.name)
    store.mkdir(parents=True, exist_ok=True)
    with claim(store / f"{UPLOAD_PREFIX}import-{uuid.uuid4().hex[:8]}") as upload:
        assert upload is not None
        try:
            statement = upload.folder / "statement"
            statement.mkdir()
            (statement / _MANIFEST).write_bytes(content)
            signing.signature_path(statement).write_bytes(reader.small("bundle.sig", signing.MAX_SIGNATURE_BYTES))
            signature = upload.folder / "version.sig"
            signature.write_bytes(reader.small("version.sig", signing.MAX_SIGNATURE_BYTES))
            reader.keys()
            # Before gigabytes are copied: it costs nothing, and a stranger's bundle is told from a friend's at once.
            exported_by = _trusted(lambda: _verify_statement(statement, content, home), manifest.exported_by, reader)
            version, events = _decode(manifest, reader)
            files = upload.files
            files.mkdir()
            digests = reader.files(manifest.files, files, sink)
            if digest_of(digests) != manifest.digest:
                raise reader.broken("its files do not make the digest that it names")
            what = f"{version.kind} {version.id}"
            signed_by = _trusted(
                lambda: signing.verify(files, home, what=what, digest=manifest.digest, signature=signature),
                manifest.signed_by,
                reader,
            )
            card = read(files)
            if card.kind != version.kind:
                raise reader.broken(f"its card is that of a {card.kind}, its facts are those of a {version.kind}")
            published = publish_verified(files, digests, card, store, home, signature=signature, signed_by=signed_by)
        finally:
            shutil.rmtree(upload.folder, ignore_errors=True)
    size = sum(file.size_bytes for file in manifest.files)
    return Imported(
        staged=staged(manifest.name, card, size, (manifest.digest, published), home),
        version=version,
        events=events,
        signed_by=signed_by,
        exported_by=exported_by,
        exported_at=manifest.exported_at,
    )


def _verify_statement(statement: Path, content: bytes, home: Home) -> str:
    digest = digest_of({_MANIFEST: hashlib.sha256(content).hexdigest()})
    return signing.verify(statement, home, what="bundle's list of contents", digest=digest)


def _trusted(verify: Callable[[], str], named: str, reader: "_Reader") -> str:
    """The key that vouches for it. An unknown one is named, with the way to trust it."""
    try:
        return verify()
    except signing.SignatureError as error:
        if error.reason == "unknown_key":
            known = f"keys/{named}.pem" if named in reader.key_ids else "its public key"
            error.message = f"{reader.bundle} says that it is signed with the key {named}, which is not trusted here."
            error.args = (error.message,)
            error.hint = (
                f"If you know whose it is: tar xf {reader.bundle} {known}, compare its id with its owner's, "
                f"then flywheel signers trust {known}."
            )
        raise


def _parse(content: bytes, reader: "_Reader") -> _Manifest:
    try:
        manifest = _Manifest.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or _MANIFEST
        raise reader.broken(f"{where} in its list of contents: {first['msg']}") from None
    names = [require_path(file.name, where=str(reader.bundle)) for file in manifest.files]
    if names != sorted(set(names)) or CARD_FILE not in names:
        raise reader.broken("its list of files is not sorted, names one twice, or has no card")
    return manifest


def _decode(manifest: _Manifest, reader: "_Reader") -> tuple[Version, tuple[Event, ...]]:
    events = []
    for one in manifest.events:
        try:
            fact = registry_facts.decode(one.event, json.dumps(one.fact))
        except ValidationError as error:
            raise reader.broken(f"its fact {one.event!r} is none: {error.errors()[0]['msg']}") from None
        except StateError as error:
            raise StateError(
                f"{reader.bundle} tells of an event {one.event!r}, which this Flywheel does not know.", hint=error.hint
            ) from None
        events.append(Event(one.seq, one.at, one.by, fact))
    for event in events:
        fact = event.fact
        if isinstance(fact, Version) and fact.id == manifest.version_id:
            if (fact.name, fact.digest) != (manifest.name, manifest.digest):
                raise reader.broken("its version's facts have another name or digest")
            return fact, tuple(events)
    raise reader.broken(f"the facts of {manifest.version_id} are not in it")


class _Writer:
    """Members of a tar, each the same bytes whoever writes it when."""

    def __init__(self, out: BinaryIO, sink: Sink, total: int) -> None:
        self._out = out
        self._sink = sink
        self._total = total
        self._done = 0

    def put(self, name: str, path: Path, *, counted: bool = False) -> None:
        with open_plainly(path) as file:
            info = TarInfo(name)
            info.size = os.fstat(file.fileno()).st_size
            info.mode = 0o644
            self._out.write(info.tobuf(PAX_FORMAT, "utf-8", "strict"))
            left = info.size
            while left:
                chunk = file.read(min(left, _CHUNK))
                if not chunk:
                    raise OSError(f"{path} became shorter while it was read")
                self._out.write(chunk)
                left -= len(chunk)
                if counted:
                    self._done += len(chunk)
            self._out.write(bytes(-info.size % BLOCKSIZE))
        if counted:
            self._sink(Progress("exporting", self._done, self._total, unit="bytes"))


class _Reader:
    """The members of a bundle, in their order. `tarfile` would unpack much more than we write, so it is not used."""

    def __init__(self, file: BinaryIO, bundle: Path) -> None:
        self.bundle = bundle
        self.key_ids: set[str] = set()
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._ahead: tuple[str, int] | None = None

    def broken(self, why: str) -> ConfigError:
        return ConfigError(f"{self.bundle} is no bundle that can be imported: {why}.", hint="Export it again.")

    def small(self, name: str, limit: int) -> bytes:
        found, size = self._next()
        if found != name:
            raise self.broken(f"{found!r} stands where {name} belongs")
        if size > limit:
            raise self.broken(f"{name} has {size} bytes; {limit} is the limit")
        content = self._read(size)
        self._skip_padding(size)
        return content

    def keys(self) -> None:
        for _ in range(_MOST_KEYS):
            name, size = self._next()
            if not name.startswith("keys/") or not name.endswith(".pem") or size > _LARGEST_KEY:
                self._ahead = (name, size)
                return
            self.key_ids.add(name.removeprefix("keys/").removesuffix(".pem"))
            self._read(size)
            self._skip_padding(size)

    def files(self, expected: Sequence[_File], folder: Path, sink: Sink) -> dict[str, str]:
        """Write all files into `folder`, durably; their digests, each of which is the expected one."""
        digests, done, total = {}, 0, sum(file.size_bytes for file in expected)
        for file in expected:
            name, size = self._next()
            if (name, size) != (f"files/{file.name}", file.size_bytes):
                raise self.broken(f"{name!r} with {size} bytes stands where {file.name} belongs")
            target = folder / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            running = hashlib.sha256()
            with target.open("xb") as out:
                left = size
                while left:
                    chunk = self._read(min(left, _CHUNK))
                    running.update(chunk)
                    out.write(chunk)
                    left -= len(chunk)
                    done += len(chunk)
                    sink(Progress("importing", done, total, unit="bytes"))
                out.flush()
                os.fsync(out.fileno())
            if running.hexdigest() != file.sha256:
                raise self.broken(f"{file.name} is damaged")
            digests[file.name] = file.sha256
            self._skip_padding(size)
        if any(self._read(2 * BLOCKSIZE)) or self._file.read(1):
            raise self.broken("something follows its last file")
        return digests

    def _next(self) -> tuple[str, int]:
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            return ahead
        info = self._header()
        more: dict[str, str] = {}
        if info.type == b"x":
            if info.size > _LONGEST_PAX:
                raise self.broken("it has a long extended header")
            more = self._records(self._read(info.size))
            self._skip_padding(info.size)
            info = self._header()
        if info.type not in (b"0", b"\0") or info.linkname:
            raise self.broken(f"{info.name!r} is a link, a folder or a device")
        try:
            size = int(more["size"]) if "size" in more else info.size
        except ValueError:
            raise self.broken("it has a size that is none") from None
        name = more.get("path", info.name)
        if not 0 <= size <= self._size - self._file.tell():
            raise self.broken(f"{name!r} would be longer than the file")
        # A version's files stand below `files/`, which does not count among their parts and bytes.
        require_path(name.removeprefix("files/"), where=str(self.bundle))
        return name, size

    def _header(self) -> TarInfo:
        try:
            return TarInfo.frombuf(self._read(BLOCKSIZE), "utf-8", "strict")
        except (TarError, ValueError) as error:
            raise self.broken(f"it is damaged at byte {self._file.tell()} ({error})") from None

    def _records(self, content: bytes) -> dict[str, str]:
        """The records of an extended header: `length key=value` and a line break each."""
        records: dict[str, str] = {}
        try:
            while content:
                length = int(content[: content.index(b" ")])
                record, content = content[:length], content[length:]
                key, _, value = record[record.index(b" ") + 1 : -1].decode().partition("=")
                if length != len(record) or key not in ("path", "size") or key in records:
                    raise ValueError
                records[key] = value
        except ValueError:
            raise self.broken("it has an extended header that we would not write") from None
        return records

    def _read(self, count: int) -> bytes:
        if count > self._size - self._file.tell():
            raise self.broken("it ends too early")
        content = self._file.read(count)
        if len(content) != count:
            raise self.broken("it ends too early")
        return content

    def _skip_padding(self, size: int) -> None:
        if any(self._read(-size % BLOCKSIZE)):
            raise self.broken("there is something between two members")


def _digest(path: Path) -> str:
    with open_plainly(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _open(bundle: Path) -> Iterator[BinaryIO]:
    if not bundle.is_file():
        raise ConfigError(f"There is no file {bundle}.", hint="Give what `flywheel models export` wrote.")
    with open_plainly(bundle.resolve()) as file:
        yield file


@contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.parent / f"{PARTIAL_PREFIX}{target.name}-{uuid.uuid4().hex[:8]}"
    scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
