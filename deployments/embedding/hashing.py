"""An embedder without a model: words hashed into a vector. It keeps the port's contract in a few microseconds.

It serves tests and trials of what stands around an embedder; its vectors know nothing of meaning. Source:
Weinberger et al. 2009, arXiv:0902.2206.
"""

import hashlib
import re

import numpy as np

from cluster.errors import RequestError
from cluster.vectors.port import Fingerprint, Vectors
from deployments.embedding.port import Embedded, EmbedderInfo, Inputs

_WORD = re.compile(r"\w+")


class HashEmbedder:
    """`Embedder` whose tokens are words, or the given ids. Texts with the same words have the same vector."""

    def __init__(self, *, name: str = "hashing", dimension: int = 64, max_tokens: int = 256) -> None:
        digest = hashlib.sha256(f"{name}/{dimension}".encode()).hexdigest()
        fingerprint = Fingerprint(name, digest, dimension, normalized=True)
        self._info = EmbedderInfo(name, digest, dimension, max_tokens, fingerprint)

    async def embed(self, texts: Inputs, *, truncate: bool = False) -> Embedded:
        if not texts:
            raise RequestError("There is nothing to embed: the input is empty.", param="input")
        limit = self._info.max_tokens
        words = [
            _WORD.findall(text.lower()) if isinstance(text, str) else [str(token) for token in text] for text in texts
        ]
        for index, found in enumerate(words):
            if len(found) > limit and not truncate:
                raise RequestError(
                    f"Input {index} has {len(found)} tokens; {self._info.name} reads at most {limit}.",
                    param=f"input[{index}]",
                    code="context_length_exceeded",
                )
        words = [found[:limit] for found in words]
        vectors = np.stack([self._vector(found) for found in words])
        return Embedded(vectors, [len(found) for found in words], self._info.fingerprint)

    async def info(self) -> EmbedderInfo:
        return self._info

    def _vector(self, words: list[str]) -> Vectors:
        vector = np.zeros(self._info.dimension, dtype=np.float32)
        # A constant first place keeps the vector of no words from being zero, which has no direction.
        vector[0] = 1e-3
        for word in words:
            code = int.from_bytes(hashlib.sha256(word.encode("utf-8", "surrogatepass")).digest()[:8], "big")
            vector[code % len(vector)] += 1 if code >> 32 & 1 else -1
        return np.asarray(vector / np.linalg.norm(vector), dtype=np.float32)
