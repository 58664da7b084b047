"""Which of several embedders a collection is of: the one whose fingerprint it bears. Knows the ports only."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from cluster.vectors.port import CollectionSpec, Fingerprint, mismatch
from deployments.embedding.port import Embedder, EmbedderInfo


class Embedders:
    """The embedders of the application; new collections are made by the first."""

    def __init__(self, embedders: Sequence[Embedder]) -> None:
        self._embedders = list(embedders)
        self._known: dict[Fingerprint, Embedder] = {}

    @property
    def first(self) -> Embedder:
        """Whose a new collection is."""
        return self._embedders[0]

    async def of(self, existing: CollectionSpec) -> Embedder:
        """The embedder that made `existing`. `RequestError` 409 if none of them did.

        With one only it is that one, and what it answers tells (`require_same`): nobody is asked in vain.
        """
        if len(self._embedders) == 1:
            return self.first
        if found := self._known.get(existing.fingerprint):
            return found
        answers = await asyncio.gather(*(one.info() for one in self._embedders), return_exceptions=True)
        for embedder, answer in zip(self._embedders, answers, strict=True):
            if isinstance(answer, EmbedderInfo):
                self._known[answer.fingerprint] = embedder
        if found := self._known.get(existing.fingerprint):
            return found
        if silent := [answer for answer in answers if isinstance(answer, BaseException)]:
            raise silent[0]  # it may be the one
        # The first that has at least the name, else simply the first.
        nearest = min(self._known, key=lambda known: known.model != existing.fingerprint.model)
        raise mismatch(existing, replace(existing, fingerprint=nearest))

    def require_same(self, existing: CollectionSpec, fingerprint: Fingerprint) -> None:
        """`RequestError` 409 if vectors of `fingerprint` may not be compared with those of `existing`."""
        if fingerprint != existing.fingerprint:
            self._known.clear()  # one of them serves another model by now
            raise mismatch(existing, replace(existing, fingerprint=fingerprint))
