"""The embedding deployment: texts in, vectors out, many callers sharing each pass through the model.

It reads and checks inputs, and waits; the model is in `encoder`, the batches in `deployments.batching`.
It knows no HTTP and no collection.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
from ray.serve import Application

from cluster import models
from cluster.errors import ConfigError, RequestError
from cluster.signing import Verifier
from cluster.storage import Home
from cluster.vectors.port import Fingerprint
from deployments.batching import replicas
from deployments.batching.batcher import Batcher
from deployments.batching.padding import TokenIds
from deployments.batching.reading import beginning, readable, size_bytes
from deployments.embedding import matryoshka
from deployments.embedding.config import EmbeddingConfig
from deployments.embedding.port import Embedded, EmbedderInfo, Inputs, InputType

NAME = "embedding"


def build(config: EmbeddingConfig, *, name: str = NAME) -> Application:
    """The deployment `name` of one embedding model."""
    return replicas.deployment(EmbeddingServer, config, name=name)


class EmbeddingServer:
    """One embedding model, loaded once; `embed` may be called by many at the same time.

    Raises `ConfigError` if `config.model` names no text embedder or `max_tokens` is more than it reads, and
    `SignatureError` if nobody who is trusted vouches for its files.
    """

    def __init__(self, config: EmbeddingConfig, home: Home | None = None) -> None:
        # Heavy, and needed by the replica only: whoever builds the application does not load torch.
        import torch

        from deployments.embedding.encoder import Encoder

        home = home or Home.current()
        model = models.obtain(config.model, home)
        if model.kind != "sentence-embedder":
            raise ConfigError(
                f"serve.embedding.model is {config.model!r}, a {model.kind}.",
                hint="Give a sentence-transformers model, for example all-minilm-l6-v2.",
            )
        models.require_signed(model, home, Verifier())
        torch.set_num_threads(config.threads)
        self._encoder = Encoder(
            model.path,
            dtype=config.dtype,
            max_tokens=config.max_tokens,
            wanted_prompts=config.prompts,
            wanted_dimensions=config.dimensions,
            device="cuda" if config.gpus else "cpu",
        )
        # A version's folder has its digest for a name.
        name = config.version or model.name
        fingerprint = Fingerprint(
            model=name,
            digest=model.digest,
            dimension=self._encoder.dimension,
            normalized=self._encoder.normalized,
            prompt=self._encoder.prompts.document,
        )
        self._info = EmbedderInfo(
            name=name,
            digest=model.digest,
            dimension=self._encoder.dimension,
            max_tokens=self._encoder.max_tokens,
            fingerprint=fingerprint,
            dimensions=self._encoder.dimensions,
        )
        self._batcher = Batcher(config, self._encoder.encode, part="the embedder", section="serve.embedding")

    async def embed(
        self,
        texts: Inputs,
        *,
        input_type: InputType | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> Embedded:
        """The vectors of `texts`, which are strings or lists of token ids (special tokens and prompt included).

        Raises `RequestError` 400 if there are none, if one is too long (`context_length_exceeded`, naming
        which) and `truncate` does not allow to read only its beginning, if token ids are not the model's, or if
        `dimensions` are none of those that it offers; `RateLimitError` 429 if too much waits already.
        """
        if not texts:
            raise RequestError("There is nothing to embed: the input is empty.", param="input")
        matryoshka.require(dimensions, self._info.dimensions, self._info.name)
        prompt = self._prompt(texts, input_type)
        vectors, tokens = await self._batcher.run(
            texts,
            [size_bytes(text) if isinstance(text, str | list) else 0 for text in texts],
            partial(self._read, kind=type(texts[0]), prompt=prompt, truncate=truncate),
            param="input",
        )
        return Embedded(matryoshka.cut(vectors, dimensions), tokens, self._fingerprint(prompt, input_type, dimensions))

    async def info(self) -> EmbedderInfo:
        """Name, digest, dimension, longest input and fingerprint of the model."""
        return self._info

    async def describe(self) -> dict[str, Any]:
        """Facts for health and for people, as plain data."""
        return {
            "model": self._info.name,
            "digest": self._info.digest,
            "dimensions": self._info.dimension,
            "dimensions_offered": list(self._info.dimensions),
            "max_tokens": self._info.max_tokens,
            "fingerprint": {"id": self._info.fingerprint.id, **asdict(self._info.fingerprint)},
            "waiting": self._batcher.waiting,
        }

    async def check_health(self) -> None:
        """Called by Serve: a replica whose queue does not move is replaced."""
        self._batcher.require_alive()

    def close(self) -> None:
        """Stop the threads."""
        self._batcher.close()

    def _prompt(self, texts: Inputs, input_type: InputType | None) -> str:
        """What stands before `texts`; nothing before token ids, which are taken as they are."""
        prompt = self._encoder.prompts.before(input_type)
        if isinstance(texts[0], str):
            return prompt
        if prompt and input_type is not None:
            raise RequestError(
                f"{self._info.name} has a prompt for each {input_type}, which cannot be put before token ids.",
                param="input_type",
                code="invalid_value",
                hint="Give strings; or put the prompt's tokens in yourself, and leave `input_type` out.",
            )
        return ""

    def _fingerprint(self, prompt: str, input_type: InputType | None, dimensions: int | None) -> Fingerprint:
        """Of vectors that were made in this way: which others they may be compared with.

        A query is compared with documents, so its fingerprint is theirs.
        """
        own = self._info.fingerprint
        if input_type is None:
            own = replace(own, prompt=prompt)
        if dimensions is None or dimensions == own.dimension:
            return own
        return replace(own, dimension=dimensions, normalized=True)

    def _read(
        self, start: int, inputs: Sequence[str | list[int]], *, kind: type, prompt: str, truncate: bool
    ) -> list[TokenIds]:
        """Token ids of each input, none longer than the model reads. All of a call are of one `kind`."""
        if kind is not str:
            return [self._known_ids(start + place, ids, truncate) for place, ids in enumerate(inputs)]
        strings = [self._string(start + place, text) for place, text in enumerate(inputs)]
        begun = [beginning(prompt + text, self._info.max_tokens, self._count) for text in strings]
        read = self._encoder.tokenize(begun, truncate=truncate)
        for place, ids in enumerate(read):
            if len(ids) > self._info.max_tokens:
                whole = len(begun[place]) == len(prompt) + len(strings[place])
                raise self._too_long(start + place, f"{len(ids)}" if whole else f"more than {len(ids)}")
        return read

    def _count(self, text: str) -> int:
        return len(self._encoder.tokenize([text])[0])

    def _string(self, index: int, text: Any) -> str:
        if not isinstance(text, str):
            raise self._no_input(index)
        return readable(text)

    def _known_ids(self, index: int, ids: Any, truncate: bool) -> TokenIds:
        size = self._encoder.vocabulary_size
        if isinstance(ids, str) or not ids or not all(isinstance(one, int) and 0 <= one < size for one in ids):
            raise self._no_input(index)
        if len(ids) > self._info.max_tokens and not truncate:
            raise self._too_long(index, f"{len(ids)}")
        return np.asarray(ids[: self._info.max_tokens], dtype=np.int32)

    def _no_input(self, index: int) -> RequestError:
        return RequestError(
            f"Input {index} is not a list of token ids from 0 to {self._encoder.vocabulary_size - 1}.",
            param=f"input[{index}]",
            code="invalid_value",
            hint="Give only strings, or only lists of token ids of this model's tokenizer.",
        )

    def _too_long(self, index: int, tokens: str) -> RequestError:
        return RequestError(
            f"Input {index} has {tokens} tokens; {self._info.name} reads at most {self._info.max_tokens}.",
            param=f"input[{index}]",
            code="context_length_exceeded",
            hint="Split the text, or send `truncate: true` to have only its beginning read.",
        )
