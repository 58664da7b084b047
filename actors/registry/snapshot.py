"""What a server needs to know of the registry, as one immutable value, and how a name becomes a version.

Gateways and replicas hold a `Snapshot` each and resolve against it; no call to the registry stands on the path
of a request. This module is pure: it knows neither Ray nor SQL, and it does not know how the facts came about.
"""

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Final, Literal

from actors.registry.apikeys import ApiKey
from cluster.errors import RequestError

Kind = Literal["adapter", "model", "embedder"]
Split = dict[int, float]
"""Share of an alias's traffic by version number; the shares add up to 1."""

DEFAULT_ALIAS: Final = "champion"
_REFERENCE: Final = re.compile(r"(?P<name>[^@/]+)(?:@(?P<alias>[^@/]+)|/(?P<version>[1-9][0-9]{0,8}))?")


@dataclass(frozen=True)
class Route:
    """One version as a server needs it. `path`, under the snapshot's root, holds what `digest` (SHA-256) names."""

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
class Model:
    """One name: its versions that can be served, oldest first, and where its aliases stand."""

    name: str
    versions: Mapping[int, Route] = field(default_factory=dict)
    aliases: Mapping[str, Split] = field(default_factory=dict)


_NO_MODEL: Final = Model("")


@dataclass(frozen=True)
class Change:
    """What differs between two snapshots: every `Model` that changed, as it is now. `whole`: all that there are.

    `keys` are all live API keys if any of them changed (they are few, and change seldom); None: they are as before.
    """

    epoch: int
    number: int
    root: Path
    models: Mapping[str, Model]
    whole: bool
    keys: Mapping[str, ApiKey] | None = None


@dataclass(frozen=True)
class Snapshot:
    """All servable versions, all aliases and all live API keys (hashes and limits, by id) at one moment.

    `number` grows with everything that servers have to know; two snapshots of one `epoch` (one life of the registry)
    with the same number are equal. `root` is the version store, against which a route's path is meant.
    """

    epoch: int = 0
    number: int = 0
    root: Path = Path()
    models: Mapping[str, Model] = field(default_factory=dict)
    keys: Mapping[str, ApiKey] = field(default_factory=dict)

    @classmethod
    def of_routes(
        cls, routes: Iterable[Route], aliases: Mapping[str, int | Split], *, number: int = 1, root: Path = Path()
    ) -> "Snapshot":
        """A snapshot of these routes; `aliases` by `name@alias`."""
        models: dict[str, Model] = {}
        for route in sorted(routes, key=lambda route: (route.name, route.version)):
            known = models.get(route.name, Model(route.name))
            models[route.name] = replace(known, versions={**known.versions, route.version: route})
        for reference, where in aliases.items():
            name, _, alias = reference.partition("@")
            split = where if isinstance(where, dict) else {where: 1.0}
            models[name] = replace(models[name], aliases={**models[name].aliases, alias: split})
        return cls(number=number, root=root, models=models)

    def names(self) -> list[str]:
        """Every registered name, sorted."""
        return sorted(self.models)

    def of(self, name: str) -> list[Route]:
        """The versions of `name`, oldest first."""
        return list(self.models.get(name, _NO_MODEL).versions.values())

    def aliases_of(self, name: str) -> dict[str, int]:
        """Each alias of `name` with the version that has most of its traffic."""
        return {alias: heaviest(split) for alias, split in self.models.get(name, _NO_MODEL).aliases.items()}

    def folder(self, route: Route) -> Path:
        """Where the files of a route lie."""
        return self.root / route.path

    def updated(self, change: Change) -> "Snapshot":
        """This snapshot with `change` in it."""
        models = change.models if change.whole else {**self.models, **change.models}
        keys = self.keys if change.keys is None else change.keys
        return Snapshot(change.epoch, change.number, change.root, models, keys)

    def since(self, earlier: "Snapshot") -> Change:
        """What has changed since `earlier`, a snapshot of the same registry."""
        changed = {name: model for name, model in self.models.items() if earlier.models.get(name) is not model}
        keys = dict(self.keys) if self.keys != earlier.keys else None
        return Change(self.epoch, self.number, self.root, changed, whole=False, keys=keys)

    def whole(self) -> Change:
        """All of it, for someone who knows nothing."""
        return Change(self.epoch, self.number, self.root, dict(self.models), whole=True, keys=dict(self.keys))


def heaviest(split: Split) -> int:
    """The version with the largest share; of equal ones the older."""
    return max(split, key=lambda number: (split[number], -number))


def resolve(snapshot: Snapshot, reference: str, default_alias: str = DEFAULT_ALIAS, *, key: str | None = None) -> Route:
    """The version that `reference` means now: `name` (its `default_alias`), `name@alias` or `name/3`.

    Of an alias whose traffic is split, `key` (a session, a user, or a request's id) decides: the same key gets the same
    version for as long as the shares stay. Without a key it is the version with the largest share.
    Raises `RequestError` (404, `model_not_found`) with what would have been found.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise _not_found(reference, "Use name, name@alias or name/version.")
    name, alias, number = match.groups()
    model = snapshot.models.get(name)
    if model is None:
        near = difflib.get_close_matches(name, snapshot.models, n=3, cutoff=0.5)
        raise _not_found(
            reference, f"Near it: {', '.join(near)}." if near else f"Registered: {_listed(snapshot.names())}."
        )
    if number:
        route = model.versions.get(int(number))
        if route is None:
            raise _not_found(reference, f"{name} serves the versions {_listed([*map(str, model.versions)])}.")
        return route
    split = model.aliases.get(alias or default_alias)
    if split is None:
        aliases = sorted(model.aliases)
        newest = next(reversed([*model.versions.values()]), None)
        raise _not_found(
            reference,
            f"{name} has {f'the aliases {_listed(aliases)}' if aliases else 'no alias yet'} "
            f"and the versions {_listed([*map(str, model.versions)])}"
            + (f"; ask for {newest.id}, or promote one." if newest else "."),
        )
    return model.versions[_pick(split, f"{name}@{alias or default_alias}", key)]


def _pick(split: Split, salt: str, key: str | None) -> int:
    if len(split) == 1:
        return next(iter(split))
    if key is None:
        return heaviest(split)
    # Weighted rendezvous hashing (Schindelhauer and Schomaker, 2005): each version draws for the key by itself, an
    # exponential time at the rate of its share, and the first wins. So a share that grows draws keys to its version,
    # and moves none between the others; intervals side by side would shift all that lie behind it.
    return min(sorted(split), key=lambda number: -math.log(_draw(f"{salt}\0{number}\0{key}")) / split[number])


def _draw(words: str) -> float:
    """A number in (0, 1) that these words always have."""
    return (int.from_bytes(blake2b(words.encode(), digest_size=6).digest(), "big") + 0.5) / 2**48


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
