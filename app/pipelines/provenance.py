"""Which code is running: the commit and the lock that lineage records."""

import hashlib
import os
import subprocess
from importlib import metadata
from pathlib import Path

from cluster import environment, lock
from cluster.storage import digest_file

_ROOT = Path(__file__).resolve().parents[2]
_LAYERS = ("app", "deployments", "actors", "cluster")


def code_commit() -> str:
    """The commit of the working copy, with `-dirty` if it has changes.

    Where there is no repository (a submitted job's working dir, an installed wheel), the digest of our
    sources stands in, as `tree:<12 hex>`; `FLYWHEEL_CODE_COMMIT` overrides both.
    """
    named = os.environ.get(environment.CODE_COMMIT)
    if named:
        return named
    commit = _git("rev-parse", "--short=12", "HEAD")
    if commit:
        return f"{commit}-dirty" if _git("status", "--porcelain", "--", *_LAYERS) else commit
    return f"tree:{_digest_of_sources()[:12]}"


def lock_digest() -> str:
    """SHA-256 of the lock that this environment was installed from, in hex."""
    kind: lock.Kind = "cpu" if metadata.version("torch").endswith("+cpu") else "cuda"
    return digest_file(lock.path(kind)) if lock.path(kind).is_file() else ""


def _git(*arguments: str) -> str:
    # Only our own repository counts: a parent folder's would name somebody else's commit.
    if not (_ROOT / ".git").exists():
        return ""
    try:
        done = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _digest_of_sources() -> str:
    total = hashlib.sha256()
    for layer in _LAYERS:
        for path in sorted((_ROOT / layer).rglob("*.py")):
            total.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()
