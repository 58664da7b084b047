"""What the gateway and the engine's replica say to each other.

Plain picklable values: the gateway needs neither vLLM nor torch to ask for a generation, and the replica
needs neither the registry nor an alias to answer one. It knows no HTTP and no Ray.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

Kind = Literal["chat", "completions", "tokenize", "detokenize"]

Answer = dict[str, Any] | bytes
"""A whole response (not streamed: one item), or a piece of its server-sent events `data: {…}\\n\\n` (streamed: many
items, cut anywhere)."""


@dataclass(frozen=True)
class Adapter:
    """One immutable adapter version, and where its files are."""

    version: str
    """Version id, for example `error-triage/3`."""
    path: str
    """Folder of its files; the signature lies beside it (`cluster.signing.signature_path`)."""
    digest: str
    """SHA-256 over the folder, as `cluster.storage.digest_folder` makes it."""

    @property
    def engine_name(self) -> str:
        """Name of the adapter inside the engine.

        vLLM keys its name table and its prefix cache by this name. The digest is part of it, so that weights
        that differ can share neither, whatever happens to version numbers.
        """
        return f"{self.version}@{self.digest[:16]}"


def version_of(engine_name: str) -> str:
    """The version id in an adapter's name inside the engine."""
    return engine_name.rpartition("@")[0]


@dataclass(frozen=True)
class Generation:
    """One thing to ask of the engine, by `kind`. `body` is the client's JSON, not yet validated by the engine."""

    kind: Kind
    body: dict[str, Any]
    request_id: str
    """The client's, or the gateway's for it: what log lines are found by. Two may have one."""
    adapter: Adapter | None = None
    """Unset: the base model answers."""
    tokens: int = 1
    """About how many it will take, prompt and answer: what the load of a replica is counted in."""
    gateway: str = ""
    """Which gateway asks."""
    waiting: int = 0
    """How many wait behind it there: the part of the demand that no replica sees (`scaling`)."""


@dataclass(frozen=True)
class Build:
    """Which settings a replica, or a gateway, was deployed with."""

    model: str
    """The name that clients ask for."""
    settings: str
    """A digest of all of them."""

    def publish(self) -> dict[str, str]:
        """As Serve carries it beside the replica's address: plain strings."""
        return {"model": self.model, "settings": self.settings}

    @classmethod
    def published(cls, metadata: Mapping[str, str]) -> Self | None:
        """What a replica has published of itself; None if nothing."""
        return cls(metadata["model"], metadata["settings"]) if "settings" in metadata else None
