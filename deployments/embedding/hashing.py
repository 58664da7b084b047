"""An embedder without a model: words hashed into a vector. It keeps the port's contract in a few microseconds.

It serves tests and trials of what stands around an embedder; its vectors know nothing of meaning. Source:
Weinberger et al. 2009, arXiv:0902.2206.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cluster.errors import RequestError
from cluster.vectors.port import Fingerprint, Vectors
from deployments.embedding.matryoshka import cut, offered, require
from deployments.embedding.port import Embedded, EmbedderInfo, Inputs, InputType
from deployments.embedding.prompts import Prompts

_NO_PROMPTS = Prompts()
_WORD = re.compile(r"\w+")


class HashEmbedder:
    """`Embedder` whose tokens are words, or the given ids. Texts with the same words have the same vector.

    Its prompts are words like others; it can be cut to any of `shorter`.
    """

    def __init__(
        self,
        *,
        name: str = "hashing",
        dimension: int = 64,
        max_tokens: int = 256,
        shorter: Sequence[int] = (),
        prompts: Prompts = _NO_PROMPTS,
    ) -> None:
        digest = hashlib.sha256(f"{name}/{dimension}".encode()).hexdigest()
        fingerprint = Fingerprint(name, digest, dimension, normalized=True, prompt=prompts.document)
        self._prompts = prompts
        self._info = EmbedderInfo(name, digest, dimension, max_tokens, fingerprint, offered(dimension, (), shorter))

    async def embed(
        self,
        texts: Inputs,
        *,
        input_type: InputType | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> Embedded:
        require(dimensions, self._info.dimensions, self._info.name)
        if not texts:
            raise RequestError("There is nothing to embed: the input is empty.", param="input")
        limit = self._info.max_tokens
        prompt = self._prompts.before(input_type)
        words = [
            _WORD.findall((prompt + text).lower()) if isinstance(text, str) else [str(token) for token in text]
            for text in texts
        ]
        for index, found in enumerate(words):
            if len(found) > limit and not truncate:
                raise RequestError(
                    f"Input {index} has {len(found)} tokens; {self._info.name} reads at most {limit}.",
                    param=f"input[{index}]",
                    code="context_length_exceeded",
                )
        words = [found[:limit] for found in words]
        vectors = cut(np.stack([self._vector(found) for found in words]), dimensions)
        fingerprint = replace(self._info.fingerprint, dimension=vectors.shape[1])
        return Embedded(vectors, [len(found) for found in words], fingerprint)

    async def info(self) -> EmbedderInfo:
        return self._info

    async def describe(self) -> dict[str, Any]:
        return {"model": self._info.name, "dimensions": self._info.dimension}

    def _vector(self, words: list[str]) -> Vectors:
        vector = np.zeros(self._info.dimension, dtype=np.float32)
        # A constant first place keeps the vector of no words from being zero, which has no direction.
        vector[0] = 1e-3
        for word in words:
            code = int.from_bytes(hashlib.sha256(word.encode("utf-8", "surrogatepass")).digest()[:8], "big")
            vector[code % len(vector)] += 1 if code >> 32 & 1 else -1
        return np.asarray(vector / np.linalg.norm(vector), dtype=np.float32)
