"""A sentence-transformers model as two plain functions: texts → token ids, token ids → vectors.

The model's own modules decide pooling and normalisation; this file only feeds them, so that a vector does
not depend on which other texts were in its batch. It knows no queue, no Ray and no HTTP.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from transformers.utils import logging as transformers_logging

from cluster.errors import ConfigError
from cluster.vectors.port import Vectors
from deployments.batching.limits import longest_input
from deployments.batching.padding import TokenIds, padded
from deployments.embedding import matryoshka, prompts
from deployments.embedding.config import PromptsConfig
from deployments.embedding.prompts import Prompts


class Encoder:
    """One embedding model on `device`.

    `max_tokens` shortens the model's own limit; it cannot lengthen it. `wanted_prompts` replace the model's, and
    `wanted_dimensions` what it says of shorter vectors. Raises `ConfigError` for a folder that holds no text embedder,
    or for a limit that the model does not have.
    """

    def __init__(
        self,
        path: Path,
        *,
        dtype: Literal["bfloat16", "float32"],
        max_tokens: int | None = None,
        wanted_prompts: PromptsConfig | None = None,
        wanted_dimensions: Sequence[int] | None = None,
        device: Literal["cpu", "cuda"] = "cpu",
    ) -> None:
        # A replica's log is no place for a progress bar.
        transformers_logging.disable_progress_bar()
        try:
            self._model = SentenceTransformer(
                str(path),
                device=device,
                local_files_only=True,
                model_kwargs={"dtype": getattr(torch, dtype)},
            ).eval()
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{path} cannot be loaded as a sentence-transformers model: {error}",
                hint="Give a folder with modules.json, or one of the catalog's embedders.",
            ) from None
        self._tokenizer = self._model.tokenizer
        self._filler = int(self._tokenizer.pad_token_id or 0)
        self.max_tokens = longest_input(path, max_tokens, self._model.max_seq_length, section="serve.embedding")
        self.dimension = int(self._model.get_embedding_dimension())
        self.normalized = any(isinstance(module, Normalize) for module in self._model)
        self.dimensions = matryoshka.offered(self.dimension, matryoshka.said_by(path), wanted_dimensions)
        self.prompts: Prompts = prompts.chosen(
            self._model.prompts, self._model.default_prompt_name, wanted_prompts or PromptsConfig()
        )
        if any(self.prompts.all) and any(isinstance(one, Pooling) and not one.include_prompt for one in self._model):
            raise ConfigError(
                f"{path} leaves its prompts out of the pooling, which is not supported.",
                hint="Set include_prompt in its pooling config, or use another model.",
            )

    def tokenize(self, texts: Sequence[str], *, truncate: bool = False) -> list[TokenIds]:
        """Token ids of each text with special tokens: whole, however long, or no more than the model reads."""
        read = self._tokenizer(
            list(texts),
            truncation=truncate,
            max_length=self.max_tokens if truncate else None,
            return_attention_mask=False,
            return_token_type_ids=False,
            # It would warn of texts that are too long; what to do with them is the caller's decision.
            verbose=False,
        )
        return [np.asarray(ids, dtype=np.int32) for ids in read["input_ids"]]

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        return int(self._model[0].model.config.vocab_size)

    @torch.inference_mode()
    def encode(self, token_ids: Sequence[TokenIds]) -> Vectors:
        """Vectors [N, D] float32 of N token id lists, in one forward pass padded to the longest."""
        ids, mask = padded(token_ids, filler=self._filler, side=self._tokenizer.padding_side)
        features = {
            "input_ids": torch.from_numpy(ids).to(self._model.device),
            "attention_mask": torch.from_numpy(mask).to(self._model.device),
        }
        transformer, *rest = self._model
        features = transformer(features)
        # Sums over tokens in float32: pooled in bfloat16, vectors lose two digits.
        features["token_embeddings"] = features["token_embeddings"].float()
        for module in rest:
            features = module(features)
        return np.asarray(features["sentence_embedding"].float().cpu().numpy(), dtype=np.float32)
