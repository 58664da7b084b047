"""The reranking deployment: a query and documents in, scores out, many callers sharing each pass through the model.

It reads and checks inputs, and waits; the model is in `scorer`, the batches in `deployments.batching`. It knows no
HTTP, and does not sort: what is best first is the caller's to say.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ray.serve import Application

from cluster import models
from cluster.errors import ConfigError, RequestError
from cluster.signing import Verifier
from cluster.storage import Home
from deployments.batching import replicas
from deployments.batching.batcher import Batcher
from deployments.batching.reading import CHARACTERS_PER_TOKEN, beginning, readable, size_bytes
from deployments.reranking.config import RerankingConfig
from deployments.reranking.port import Scored

if TYPE_CHECKING:  # it brings torch
    from deployments.reranking.scorer import Pair

NAME = "reranking"


def build(config: RerankingConfig, *, name: str = NAME) -> Application:
    """The deployment `name` of one cross-encoder."""
    return replicas.deployment(RerankingServer, config, name=name)


class RerankingServer:
    """One cross-encoder, loaded once; `rerank` may be called by many at the same time.

    Raises `ConfigError` if `config.model` names no cross-encoder or `max_tokens` is more than it reads, and
    `SignatureError` if nobody who is trusted vouches for its files.
    """

    def __init__(self, config: RerankingConfig, home: Home | None = None) -> None:
        # Heavy, and needed by the replica only: whoever builds the application does not load torch.
        import torch

        from deployments.reranking.scorer import Scorer

        home = home or Home.current()
        model = models.obtain(config.model, home)
        if model.kind != "cross-encoder":
            raise ConfigError(
                f"serve.reranking.model is {config.model!r}, a {model.kind}.",
                hint="Give a cross-encoder: a sequence classifier with one label.",
            )
        models.require_signed(model, home, Verifier())
        torch.set_num_threads(config.threads)
        self._scorer = Scorer(
            model.path, dtype=config.dtype, max_tokens=config.max_tokens, device="cuda" if config.gpus else "cpu"
        )
        self._name = config.served_as
        self._digest = model.digest
        self._batcher = Batcher(config, self._scorer.score, part="the reranker", section="serve.reranking")

    async def rerank(self, query: str, documents: list[str], *, truncate: bool = False) -> Scored:
        """How well each of `documents` answers `query`; see `port.Reranker`."""
        if not documents:
            raise RequestError("There is nothing to rank: there are no documents.", param="documents")
        # Of a long query only the beginning is read, once for each document.
        of_query = min(size_bytes(query), self._scorer.max_tokens * CHARACTERS_PER_TOKEN)
        scores, tokens = await self._batcher.run(
            documents,
            [of_query + size_bytes(text) for text in documents],
            partial(self._read, query=query, truncate=truncate),
            param="documents",
        )
        return Scored(scores[:, 0], tokens)

    async def describe(self) -> dict[str, Any]:
        """Facts for health and for people, as plain data."""
        return {
            "model": self._name,
            "digest": self._digest,
            "max_tokens": self._scorer.max_tokens,
            "waiting": self._batcher.waiting,
        }

    async def check_health(self) -> None:
        """Called by Serve: a replica whose queue does not move is replaced."""
        self._batcher.require_alive()

    def close(self) -> None:
        """Stop the threads."""
        self._batcher.close()

    def _read(self, start: int, documents: Sequence[str], *, query: str, truncate: bool) -> "list[Pair]":
        """The pairs of a slice, none longer than the model reads."""
        most = self._scorer.max_tokens
        asked = beginning(readable(query), most, self._scorer.count)
        # A query that leaves no token to a document.
        if not truncate and (tokens := self._scorer.count(asked)) >= most - self._scorer.framing:
            raise self._too_long("The query", "query", tokens)
        begun = [beginning(readable(text), most, self._scorer.count) for text in documents]
        pairs = self._scorer.tokenize(asked, begun, truncate=truncate)
        for place, pair in enumerate(pairs):
            if len(pair) > most:
                index = start + place
                raise self._too_long(f"Document {index} with the query", f"documents[{index}]", len(pair))
        return pairs

    def _too_long(self, what: str, param: str, tokens: int) -> RequestError:
        return RequestError(
            f"{what} has {tokens} tokens or more; {self._name} reads at most {self._scorer.max_tokens}.",
            param=param,
            code="context_length_exceeded",
            hint="Split the text, or send `truncate: true` to have only its beginning read.",
        )
