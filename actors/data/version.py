"""Data versions: immutable folders with a manifest, named by the digest of what they hold and what made them.

    FLYWHEEL_HOME/data/<name>/<first 12 hex of the digest>/
        manifest.json  quarantine.jsonl  train-00000.parquet …  test-00000.parquet …

Owns that layout. Does not know how rows are made, tokenized or fed to training.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from actors.data.config import Split
from actors.data.rows import Rejected, Shape
from cluster.config import Config, nearest
from cluster.errors import ConfigError, StateError
from cluster.storage import Home, digest_file, publish, require_file_name

logger = logging.getLogger(__name__)

Stage = Literal["examples", "tokens"]

SPLITS: tuple[Split, ...] = ("train", "test")
ROWS_PER_SHARD = 20_000
ROWS_PER_GROUP = 250
"""Rows that a reader has to decode to get at one of them; a shard is a whole number of groups."""
_DIGITS = 12
_MANIFEST = "manifest.json"
_QUARANTINE = "quarantine.jsonl"


class ShardManifest(Config):
    """One Parquet file."""

    file: str
    rows: int
    sha256: str


class SplitManifest(Config):
    """One side. `examples`, `tokens` (without padding) and `loss_tokens` are known in the tokens stage only."""

    rows: int
    groups: int
    files: tuple[ShardManifest, ...]
    examples: int | None = None
    tokens: int | None = None
    loss_tokens: int | None = None


class DataVersion(Config):
    """A manifest. `id` is `name@<12 hex>`; `parent` the id of the examples that tokens were made from."""

    name: str
    digest: str
    stage: Stage
    shape: Shape
    parent: str | None
    splits: dict[Split, SplitManifest]
    quarantined: dict[str, int]
    """Rows that could not be used, by reason; each stands in `quarantine.jsonl`."""
    dropped: dict[str, int]
    """Usable rows that a rule took out, by rule: duplicates, ambiguous texts, caps."""
    config: dict[str, Any]
    """The settings that made it, and the digest of the code."""
    fingerprint: str
    """Digest of the inputs, known before any work, so that building again finds this version."""
    created_at: str

    @property
    def id(self) -> str:
        return f"{self.name}@{self.digest[:_DIGITS]}"

    def folder(self, home: Home) -> Path:
        """Where the version lies."""
        return home.data / self.name / self.digest[:_DIGITS]

    def shards(self, split: Split, home: Home) -> list[Path]:
        """The Parquet files of a side, in row order.

        `ConfigError` if the version has no such side, `StateError` if a file of it was deleted.
        """
        if split not in self.splits:
            raise ConfigError(f"{self.id} has no split {split!r}.", hint=f"It has: {', '.join(self.splits)}.")
        paths = [self.folder(home) / shard.file for shard in self.splits[split].files]
        for path in paths:
            if not path.is_file():
                raise _damaged(self, home, path, "missing")
        return paths

    def quarantine(self, home: Home) -> Path:
        """JSON lines: reason, detail, file, line and text of each row that could not be used."""
        return self.folder(home) / _QUARANTINE


@dataclass(frozen=True)
class SplitContent:
    """Rows of one side, in published order, and what the manifest says of them."""

    table: pa.Table
    digest: str
    groups: int
    examples: int | None = None
    tokens: int | None = None
    loss_tokens: int | None = None


def load(home: Home, reference: str) -> DataVersion:
    """The newest version of a name, or the one of an exact id `name@<12 hex>`; `ConfigError` lists what exists.

    `StateError` if the manifest of that version cannot be read (of a name: any, because it may be the newest).
    """
    name, at, digits = reference.partition("@")
    known = []
    for path in _manifests(home):
        asked_for = path.parent.parent.name == name and (not at or path.parent.name == digits)
        known += _read_all([path], skip_damaged=not asked_for)
    known = _oldest_first(known)
    named = [version for version in known if version.name == name]
    matching = [version for version in named if version.digest[:_DIGITS] == digits] if at else named
    if matching:
        return matching[-1]
    candidates = [version.id for version in named] or sorted({version.name for version in known})
    meant = nearest(reference, candidates)
    raise ConfigError(
        f"There is no data version {reference!r}.",
        hint=(f"Did you mean {meant!r}? " if meant else "")
        + (f"There is: {', '.join(candidates)}." if candidates else "Make one with `flywheel data build`."),
    )


def versions(home: Home) -> list[DataVersion]:
    """Every published version, the oldest first; one whose manifest cannot be read is left out with a warning."""
    return _oldest_first(_read_all(_manifests(home), skip_damaged=True))


def find(home: Home, name: str, fingerprint: str) -> DataVersion | None:
    """The version that was made of exactly these inputs."""
    matching = [one for one in versions(home) if one.name == name and one.fingerprint == fingerprint]
    return matching[-1] if matching else None


def verify(version: DataVersion, home: Home) -> None:
    """Read every shard again; `StateError` names the first that is not what was published."""
    for split in version.splits.values():
        for shard in split.files:
            path = version.folder(home) / shard.file
            if not path.is_file() or digest_file(path) != shard.sha256:
                raise _damaged(version, home, path, "changed" if path.is_file() else "missing")


def store(
    home: Home,
    *,
    name: str,
    stage: Stage,
    shape: Shape,
    parent: str | None,
    contents: Mapping[Split, SplitContent],
    rejected: Sequence[Rejected],
    dropped: Mapping[str, int],
    config: Mapping[str, Any],
    fingerprint: str,
) -> DataVersion:
    """Publish a version whole or not at all.

    Equal content, with equal rows left out, made by equal code and settings is one version.
    """
    require_file_name(name, what="data version name")
    kept = {split: content.digest for split, content in contents.items()}
    left_out = {"rejected": digest_of([asdict(one) for one in rejected]), "dropped": dict(dropped)}
    identity = digest_of(name, stage, shape, config, kept, left_out)
    target = home.data / name / identity[:_DIGITS]
    if not (target / _MANIFEST).is_file():
        with publish(target) as scratch:
            version = DataVersion(
                name=name,
                digest=identity,
                stage=stage,
                shape=shape,
                parent=parent,
                splits={split: _write(scratch, split, content) for split, content in contents.items()},
                quarantined=dict(sorted(Counter(one.reason for one in rejected).items())),
                dropped=dict(dropped),
                config=dict(config),
                fingerprint=fingerprint,
                created_at=datetime.now(UTC).isoformat(timespec="microseconds"),
            )
            lines = [json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in rejected]
            (scratch / _QUARANTINE).write_text("".join(lines), encoding="utf-8")
            (scratch / _MANIFEST).write_text(version.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return _read(target / _MANIFEST)


def digest_of(*parts: object) -> str:
    """SHA-256 of JSON values, whatever the order of their keys."""
    text = json.dumps(parts, ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()  # a file's name may be no UTF-8


def code_digest(files: Iterable[str]) -> str:
    """SHA-256 over modules of this folder, by file name: a version also stands for the code that made it."""
    return digest_of([digest_file(Path(__file__).with_name(file)) for file in files])


def head(files: Sequence[Path], limit: int | None, columns: Sequence[str] | None = None) -> pa.Table:
    """The first `limit` rows of Parquet `files` (all, if None), reading no more files than that needs."""
    tables: list[pa.Table] = []
    rows = 0
    for file in files:
        if limit is not None and rows >= limit and tables:
            break
        try:
            tables.append(pq.read_table(file, columns=None if columns is None else list(columns)))
        except (pa.ArrowException, OSError) as error:
            raise StateError(
                f"{file} cannot be read: {error}.", hint=f"Delete {file.parent} and build it again."
            ) from None
        rows += tables[-1].num_rows
    return pa.concat_tables(tables).slice(0, limit)


def _write(folder: Path, split: Split, content: SplitContent) -> SplitManifest:
    rows = content.table.num_rows
    shards = []
    # An empty side still has one file, so that its columns can be read.
    for number, start in enumerate(range(0, max(rows, 1), ROWS_PER_SHARD)):
        path = folder / f"{split}-{number:05d}.parquet"
        part = content.table.slice(start, ROWS_PER_SHARD)
        pq.write_table(part, path, compression="zstd", row_group_size=ROWS_PER_GROUP)
        shards.append(ShardManifest(file=path.name, rows=part.num_rows, sha256=digest_file(path)))
    return SplitManifest(
        rows=rows,
        groups=content.groups,
        files=tuple(shards),
        examples=content.examples,
        tokens=content.tokens,
        loss_tokens=content.loss_tokens,
    )


def _damaged(version: DataVersion, home: Home, path: Path, what: str) -> StateError:
    return StateError(
        f"{path} is {what}: {version.id} cannot be trusted.",
        hint=f"Delete {version.folder(home)} and build it again.",
    )


def _manifests(home: Home) -> list[Path]:
    return sorted(home.data.glob(f"*/[!.]*/{_MANIFEST}"))


def _oldest_first(found: Iterable[DataVersion]) -> list[DataVersion]:
    return sorted(found, key=lambda version: (version.created_at, version.id))


def _read_all(paths: Iterable[Path], *, skip_damaged: bool) -> list[DataVersion]:
    found = []
    for path in paths:
        try:
            found.append(_read(path))
        except StateError as error:
            if not skip_damaged:
                raise
            logger.warning("Left out: %s", error)
    return found


def _read(path: Path) -> DataVersion:
    try:
        return DataVersion.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StateError(
            f"The manifest {path} cannot be read: {str(error).splitlines()[0]}",
            hint=f"Delete {path.parent} and build it again.",
        ) from None
