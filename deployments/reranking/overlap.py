"""A reranker without a model: the share of the query's words that a document has. For tests and trials."""

import re
from typing import Any

import numpy as np

from cluster.errors import RequestError
from deployments.reranking.port import Scored

_WORD = re.compile(r"\w+")


class WordOverlap:
    """`Reranker` whose tokens are words, and three that every pair has."""

    def __init__(self, *, name: str = "overlap", max_tokens: int = 64) -> None:
        self._name = name
        self._max_tokens = max_tokens

    async def rerank(self, query: str, documents: list[str], *, truncate: bool = False) -> Scored:
        if not documents:
            raise RequestError("There is nothing to rank: there are no documents.", param="documents")
        wanted = _WORD.findall(query.lower())
        room = self._max_tokens - 3 - len(wanted)
        if room < 1 and not truncate:
            raise self._too_long("The query", "query", len(wanted))
        found = [_WORD.findall(text.lower()) for text in documents]
        for index, words in enumerate(found):
            if len(words) > room and not truncate:
                raise self._too_long(f"Document {index} with the query", f"documents[{index}]", len(words))
        scores = [len({*wanted} & {*words[: max(1, room)]}) / max(1, len({*wanted})) for words in found]
        tokens = [min(self._max_tokens, 3 + len(wanted) + len(words)) for words in found]
        return Scored(np.array(scores, dtype=np.float32), tokens)

    async def describe(self) -> dict[str, Any]:
        return {"model": self._name, "max_tokens": self._max_tokens}

    def _too_long(self, what: str, param: str, tokens: int) -> RequestError:
        return RequestError(
            f"{what} has {tokens} tokens; {self._name} reads at most {self._max_tokens}.",
            param=param,
            code="context_length_exceeded",
        )
