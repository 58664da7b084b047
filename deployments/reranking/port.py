"""What a reranker answers, for those who call one. No torch, no Ray."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Scored:
    """`scores` is [N] float32, in the order of the documents: the higher, the better the document answers the query.
    `tokens` are those that each pair was read as, the query's included."""

    scores: npt.NDArray[np.float32]
    tokens: list[int]


class Reranker(Protocol):
    """One cross-encoder."""

    async def rerank(self, query: str, documents: list[str], *, truncate: bool = False) -> Scored:
        """How well each of `documents` answers `query`.

        Raises `RequestError` 400 for no documents, and for a query (`query`) or a document (`documents[i]`) that is
        too long unless `truncate` allows to read only the beginnings; `CapacityError` when too much waits.
        """
        ...

    async def describe(self) -> dict[str, Any]:
        """Facts for health and for people, as plain data."""
        ...
