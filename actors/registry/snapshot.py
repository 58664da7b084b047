"""What a server needs to know of the registry, as one small immutable value, and how a name becomes a version.

Gateways and replicas hold a `Snapshot` each and resolve against it; no call to the registry stands on the path
of a request. This module is pure: it knows neither Ray nor SQL, and it does not know how the facts came about.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from cluster.errors import RequestError

Kind = Literal["adapter", "model", "embedder"]

DEFAULT_ALIAS: Final = "champion"
_REFERENCE: Final = re.compile(r"(?P<name>[^@/]+)(?:@(?P<alias>[^@/]+)|/(?P<version>[1-9][0-9]{0,8}))?")


@dataclass(frozen=True)
class Route:
    """One version as a server needs it. `path` holds exactly the bytes that `digest` (SHA-256) names, for ever."""

    name: str
    version: int
    kind: Kind
    path: Path
    digest: str
    base: str

    @property
    def id(self) -> str:
        """`name/number`: what logs, usage and caches call this version."""
        return f"{self.name}/{self.version}"


@dataclass(frozen=True)
class Snapshot:
    """All versions and aliases at one moment.

    `number` grows with every registration and every move of an alias; two snapshots with the same number are equal.
    `versions` maps `name/number` to its route, `aliases` maps `name@alias` to a version's number.
    """

    number: int = 0
    versions: Mapping[str, Route] = field(default_factory=dict)
    aliases: Mapping[str, int] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Every registered name, sorted."""
        return sorted({route.name for route in self.versions.values()})

    def of(self, name: str) -> list[Route]:
        """The versions of `name`, oldest first."""
        return sorted(
            (route for route in self.versions.values() if route.name == name), key=lambda route: route.version
        )

    def aliases_of(self, name: str) -> dict[str, int]:
        """Each alias of `name` with the version it stands at."""
        prefix = f"{name}@"
        return {key.removeprefix(prefix): number for key, number in self.aliases.items() if key.startswith(prefix)}


def resolve(snapshot: Snapshot, reference: str, default_alias: str = DEFAULT_ALIAS) -> Route:
    """The version that `reference` means now: `name` (its `default_alias`), `name@alias` or `name/3`.

    Raises `RequestError` (404, `model_not_found`) with what would have been found.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise _not_found(reference, "Use name, name@alias or name/version.")
    name, alias = match["name"], match["alias"] or default_alias
    known = snapshot.of(name)
    if not known:
        near = difflib.get_close_matches(name, snapshot.names(), n=3, cutoff=0.5)
        raise _not_found(
            reference, f"Near it: {', '.join(near)}." if near else f"Registered: {_listed(snapshot.names())}."
        )
    if match["version"]:
        route = snapshot.versions.get(f"{name}/{int(match['version'])}")
        if route is None:
            raise _not_found(reference, f"{name} has the versions {_listed([str(route.version) for route in known])}.")
        return route
    number = snapshot.aliases.get(f"{name}@{alias}")
    if number is None:
        aliases = sorted(snapshot.aliases_of(name))
        raise _not_found(
            reference,
            f"{name} has {f'the aliases {_listed(aliases)}' if aliases else 'no alias yet'} "
            f"and the versions {_listed([str(route.version) for route in known])}; "
            f"ask for {known[-1].id}, or promote one.",
        )
    return snapshot.versions[f"{name}/{number}"]


def _not_found(reference: str, hint: str) -> RequestError:
    return RequestError(
        f"The model {reference!r} does not exist.",
        status=404,
        param="model",
        code="model_not_found",
        hint=hint,
    )


def _listed(words: list[str]) -> str:
    shown = words if len(words) <= 8 else [*words[:3], "…", *words[-3:]]
    return ", ".join(shown) if shown else "nothing"
