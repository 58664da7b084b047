"""What the gateway and the engine's replica say to each other.

Plain picklable values: the gateway needs neither vLLM nor torch to ask for a generation, and the replica
needs neither the registry nor an alias to answer one. It knows no HTTP and no Ray.
"""

from dataclasses import dataclass
from typing import Any, Literal

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
