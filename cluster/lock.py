"""What a lock file says, and how far the installed packages are from it.

A lock names every package of an environment with one exact version. This module knows no pip and no network,
and only the standard library, because the installer reads it before anything is installed.
"""

from __future__ import annotations  # also read by a Python that is too old, see cluster.install

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Literal

Kind = Literal["cpu", "cuda"]

_LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9.!+_-]+)")


class LockError(ValueError):
    """A line that is not `name==version`, or a name given twice."""


@dataclass(frozen=True)
class Drift:
    """Where an environment is not what the lock says."""

    missing: tuple[str, ...]
    """`name==version` of the lock, not installed at all."""
    differing: tuple[str, ...]
    """`name installed, lock wants version`."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.differing)


def canonical(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse(text: str) -> dict[str, str]:
    """Canonical name → version for every line; `LockError` on a line that does not pin exactly."""
    pins: dict[str, str] = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        matched = _LINE.fullmatch(line)
        if matched is None:
            raise LockError(f"line {number}: {line!r} is not name==version")
        name = canonical(matched[1])
        if name in pins:
            raise LockError(f"line {number}: {name} is given twice")
        pins[name] = matched[2]
    return pins


def path(kind: Kind) -> Path:
    """The lock of machines without (`cpu`) or with (`cuda`) an NVIDIA GPU."""
    return Path(__file__).resolve().parents[1] / "locks" / f"{kind}.txt"


def installed() -> dict[str, Distribution]:
    """Canonical name → the distribution that this interpreter imports.

    The first on `sys.path` counts, as it does for `import`: setuptools, once imported, adds a folder of copies of
    other packages, of other versions, at the end. Metadata without a name is what a cut-off removal leaves.
    """
    found: dict[str, Distribution] = {}
    for each in distributions():
        # An error where the package importlib_metadata, once imported, has put itself in the standard library's place.
        with suppress(FileNotFoundError):
            if each.metadata["Name"]:
                found.setdefault(canonical(each.metadata["Name"]), each)
    return found


def drift(wanted: Mapping[str, str], installed: Mapping[str, str]) -> Drift:
    """Compare canonical name → version maps; packages that the lock does not name do not count."""
    missing = [f"{name}=={version}" for name, version in wanted.items() if name not in installed]
    differing = [
        f"{name} {installed[name]}, lock wants {version}"
        for name, version in wanted.items()
        if name in installed and installed[name] != version
    ]
    return Drift(tuple(missing), tuple(differing))
