"""What an embedder answers, for those who call one. No torch, no Ray: search and gateway import this."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from cluster.vectors.port import Fingerprint, Vectors

InputType = Literal["query", "document"]
"""What an input is for: to be compared with documents, or to be found. The model's prompts depend on it."""
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
    """Of vectors of documents and of queries to them, at full length."""
    dimensions: tuple[int, ...] = ()
    """To which vectors may be cut; the first is `dimension`."""


class Embedder(Protocol):
    """One embedding model."""

    async def embed(
        self,
        texts: Inputs,
        *,
        input_type: InputType | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> Embedded:
        """The vectors of `texts`, cut to `dimensions` and normalised again if these are fewer than the model's.

        Raises `RequestError` 400 for no input, for dimensions that are not offered, and for an input that is too
        long unless `truncate` allows to read only its beginning; `RateLimitError` 429 when too much waits.
        """
        ...

    async def info(self) -> EmbedderInfo:
        """The facts that a collection is bound to."""
        ...

    async def describe(self) -> dict[str, Any]:
        """Facts for health and for people, as plain data."""
        ...
