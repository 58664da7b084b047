"""What an embedder answers, for those who call one. No torch, no Ray: search and gateway import this."""

from dataclasses import dataclass
from typing import Protocol

from cluster.vectors.port import Fingerprint, Vectors

Inputs = list[str] | list[list[int]]
"""Texts, or texts that the caller has already turned into token ids of this model's tokenizer."""


@dataclass(frozen=True)
class Embedded:
    """`vectors` is [N, D] float32, in the order of the inputs; `tokens` are those each input was read as.

    `fingerprint` travels with the vectors, so that no caller can file them under another model's name.
    """

    vectors: Vectors
    tokens: list[int]
    fingerprint: Fingerprint


@dataclass(frozen=True)
class EmbedderInfo:
    """Which model answers, and within which bounds."""

    name: str
    digest: str
    dimension: int
    max_tokens: int
    fingerprint: Fingerprint


class Embedder(Protocol):
    """One embedding model."""

    async def embed(self, texts: Inputs, *, truncate: bool = False) -> Embedded:
        """The vectors of `texts`.

        Raises `RequestError` 400 for no input, and for an input that is too long unless `truncate` allows
        to read only its beginning; `CapacityError` when too many texts wait.
        """
        ...

    async def info(self) -> EmbedderInfo:
        """The facts that a collection is bound to."""
        ...
