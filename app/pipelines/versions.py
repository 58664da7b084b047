"""Whole versions: checking what lies in the store, and moving one between two installations."""

from datetime import UTC, datetime
from pathlib import Path

from actors.registry import bundle, views
from actors.registry.card import CARD_FILE
from actors.registry.facts import Origin, Version, VersionFact
from actors.registry.lineage import origins
from actors.registry.reader import read_state
from cluster import signing
from cluster.config import Config
from cluster.errors import ConfigError
from cluster.progress import Progress, Sink
from cluster.storage import Home, digest_of, file_digests


class Verified(Config):
    """A version's files: the key that vouches for them as they are, or why nobody does."""

    version_id: str
    key_id: str | None
    reason: str | None = None


class Exported(Config):
    """A version in one file."""

    version_id: str
    file: Path
    size_bytes: int
    signed_by: str


def verified(home: Home, reference: str | None, sink: Sink) -> list[Verified]:
    """Read the files of one version (or of all that have files) and check digest and signature."""
    state = read_state(home)
    if reference is None:
        asked = [version for several in state.versions.values() for version in several]
    else:
        asked = [views.find(state, reference)]
    there = [version for version in asked if version.id not in state.collected]
    if reference is not None and not there:
        raise ConfigError(f"The files of {asked[0].id} have been freed.", hint="Register the content again.")
    found = []
    for place, version in enumerate(there):
        sink(Progress("verify", place, len(there), "versions", note=version.id))
        found.append(_verified(home, version))
    return found


def sign_again(home: Home, reference: str) -> Verified:
    """Sign a version's files with this installation's key. `ConfigError` if they are not those that were registered."""
    version = views.find(read_state(home), reference)
    folder = home.versions / version.path
    digests = file_digests(folder) if folder.is_dir() else {}
    if digest_of(digests) != version.digest:
        raise ConfigError(
            f"The files of {version.id} are not those that were registered; they are not signed.",
            hint="Restore them, or register the content again.",
        )
    return Verified(version_id=version.id, key_id=signing.sign(folder, home, digests))


def export_version(home: Home, reference: str, out: Path | None, sink: Sink) -> Exported:
    """Write a version with its lineage and signature to `out` (default: `NAME-NUMBER.tar` here)."""
    state = read_state(home)
    version = views.find(state, reference)
    if version.id in state.collected:
        raise ConfigError(f"The files of {version.id} have been freed.", hint="Register the content again.")
    folder = home.versions / version.path
    if folder.is_dir() and not (folder / CARD_FILE).is_file():
        raise ConfigError(
            f"{version.id} is from before versions had a card; no installation could import it.",
            hint="Register its content again, then export that version.",
        )
    target = (out or Path(f"{version.name}-{version.number}.tar")).absolute()
    file = bundle.export(version, origins(state, version.id), home, target, sink, at=datetime.now(UTC))
    return Exported(version_id=version.id, file=file, size_bytes=file.stat().st_size, signed_by=version.signed_by)


def import_version(home: Home, file: Path, sink: Sink) -> Version:
    """Bring the version in `file` into this installation as a candidate. Needs or starts Ray."""
    from app.pipelines.registry import writer  # imports ray

    found = bundle.bring_in(file, home, sink)
    there = found.version
    fact = VersionFact.model_validate(
        {name: getattr(there, name) for name in VersionFact.model_fields} | {"source_path": file, "parent": None}
    )
    origin = Origin(
        version_id=there.id,
        signed_by=found.signed_by,
        exported_at=found.exported_at,
        exported_by=found.exported_by,
    )
    facts = tuple(event.fact for event in found.events if not isinstance(event.fact, Version))
    with writer(home) as registry:
        return registry.adopt(facts, fact, found.staged.artifact, origin)


def _verified(home: Home, version: Version) -> Verified:
    what = f"{version.kind} {version.id}"
    try:
        key_id = signing.verify(home.versions / version.path, home, what=what, digest=version.digest)
    except signing.SignatureError as error:
        return Verified(version_id=version.id, key_id=None, reason=f"{error.reason}: {error.message}")
    return Verified(version_id=version.id, key_id=key_id)
