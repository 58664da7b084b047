"""The embedding deployment: texts in, vectors out, many callers sharing each pass through the model.

It reads and checks inputs, and waits; the model is in `encoder`, the batches in `queue` and `batching`.
It knows no HTTP and no collection.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from ray import serve
from ray.serve import Application

from cluster import environment, models
from cluster.errors import ConfigError, RequestError
from cluster.signing import Verifier
from cluster.storage import Home
from cluster.vectors.port import Fingerprint
from deployments.embedding import matryoshka
from deployments.embedding.config import EmbeddingConfig
from deployments.embedding.port import Embedded, EmbedderInfo, Inputs, InputType
from deployments.embedding.queue import EmbeddingQueue

NAME = "embedding"
ONGOING_REQUESTS = 256
"""Calls that one replica has in hand. The bound that matters is `max_queued`, in texts."""
HEALTH_PERIOD_S = 5
START_TRIES = 2


def build(config: EmbeddingConfig) -> Application:
    """The deployment of one embedding model."""
    return (
        serve.deployment(EmbeddingServer)
        .options(
            name=NAME,
            num_replicas=config.replicas,
            max_ongoing_requests=ONGOING_REQUESTS,
            max_surge_percent=100,  # an update leaves no gap
            health_check_period_s=HEALTH_PERIOD_S,
            max_constructor_retry_count=START_TRIES,
            ray_actor_options={
                "num_cpus": config.threads,
                "num_gpus": config.gpus,
                "runtime_env": {"env_vars": environment.for_workers()},
            },
        )
        .bind(config)
    )


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
        fingerprint = Fingerprint(
            model=model.name,
            digest=model.digest,
            dimension=self._encoder.dimension,
            normalized=self._encoder.normalized,
            prompt=self._encoder.prompts.document,
        )
        self._info = EmbedderInfo(
            name=model.name,
            digest=model.digest,
            dimension=self._encoder.dimension,
            max_tokens=self._encoder.max_tokens,
            fingerprint=fingerprint,
            dimensions=self._encoder.dimensions,
        )
        self._max_inputs = config.max_queued
        self._queue = EmbeddingQueue(
            self._encoder.encode,
            batch_tokens=config.batch_tokens,
            batch_wait_s=config.batch_wait_s,
            max_queued=config.max_queued,
        )
        # One thread: a fast tokenizer keeps its truncation setting in itself and may not be used by two.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

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
        `dimensions` are none of those that it offers; `CapacityError` 503 if too many texts wait already.
        """
        self._require_inputs(texts)
        matryoshka.require(dimensions, self._info.dimensions, self._info.name)
        prompt = self._prompt(texts, input_type)
        reading = asyncio.get_running_loop().run_in_executor(self._reader, self._read, texts, prompt, truncate)
        token_ids = await reading
        vectors = await asyncio.wrap_future(self._queue.submit(token_ids))
        tokens = [len(ids) for ids in token_ids]
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
            "waiting": self._queue.waiting,
        }

    async def check_health(self) -> None:
        """Called by Serve: a replica whose queue does not move is replaced."""
        if not self._queue.alive:
            raise RuntimeError("the embedding thread has ended")

    def close(self) -> None:
        """Stop the threads."""
        self._queue.close()
        self._reader.shutdown()

    def _require_inputs(self, texts: Inputs) -> None:
        if not texts:
            raise RequestError("There is nothing to embed: the input is empty.", param="input")
        if len(texts) > self._max_inputs:
            raise RequestError(
                f"{len(texts)} inputs in one call; at most {self._max_inputs} are taken.",
                param="input",
                hint="Send them in several calls.",
            )

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

    def _read(self, texts: Inputs, prompt: str, truncate: bool) -> list[list[int]]:
        """Token ids of each input, none longer than the model reads."""
        strings = [text for text in texts if isinstance(text, str)]
        if len(strings) == len(texts):
            read = self._encoder.tokenize(strings, prompt)
        else:
            read = [self._known_ids(index, ids) for index, ids in enumerate(texts)]
        limit = self._info.max_tokens
        for index, ids in enumerate(read):
            if len(ids) <= limit:
                continue
            if not truncate:
                raise RequestError(
                    f"Input {index} has {len(ids)} tokens; {self._info.name} reads at most {limit}.",
                    param=f"input[{index}]",
                    code="context_length_exceeded",
                    hint="Split the text, or allow it to be truncated.",
                )
            text = texts[index]
            read[index] = self._encoder.shorten(text, prompt) if isinstance(text, str) else ids[:limit]
        return read

    def _known_ids(self, index: int, ids: Any) -> list[int]:
        size = self._encoder.vocabulary_size
        if isinstance(ids, str) or not ids or not all(isinstance(one, int) and 0 <= one < size for one in ids):
            raise RequestError(
                f"Input {index} is not a list of token ids from 0 to {size - 1}.",
                param=f"input[{index}]",
                code="invalid_value",
                hint="Give only strings, or only lists of token ids of this model's tokenizer.",
            )
        return list(ids)
