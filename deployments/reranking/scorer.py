"""A cross-encoder as two plain functions: pairs of texts → token ids, token ids → scores.

The model's own modules and activation decide what a score is; this file only feeds them, so that a score does not
depend on which other pairs were in its batch. It knows no queue, no Ray and no HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from sentence_transformers import CrossEncoder
from transformers.utils import logging as transformers_logging

from cluster.errors import ConfigError
from cluster.vectors.port import Vectors
from deployments.batching.limits import longest_input
from deployments.batching.padding import TokenIds, padded


@dataclass(frozen=True)
class Pair:
    """A query and a document as one row: `types` [T] says to which of the two each of `ids` [T] belongs."""

    ids: TokenIds
    types: TokenIds

    def __len__(self) -> int:
        return len(self.ids)


class Scorer:
    """One cross-encoder on `device`.

    `max_tokens` shortens the model's own limit; it cannot lengthen it. Raises `ConfigError` for a folder that holds no
    cross-encoder of one score, or for a limit that the model does not have.
    """

    def __init__(
        self,
        path: Path,
        *,
        dtype: Literal["bfloat16", "float32"],
        max_tokens: int | None = None,
        device: Literal["cpu", "cuda"] = "cpu",
    ) -> None:
        transformers_logging.disable_progress_bar()
        try:
            self._model = CrossEncoder(
                str(path),
                device=device,
                local_files_only=True,
                model_kwargs={"dtype": getattr(torch, dtype)},
            ).eval()
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{path} cannot be loaded as a cross-encoder: {error}",
                hint="Give a folder as CrossEncoder.save_pretrained() writes it.",
            ) from None
        if self._model.num_labels != 1:
            raise ConfigError(
                f"{path} is a classifier of {self._model.num_labels} classes; a reranker has one score.",
                hint="Use a cross-encoder that was trained with num_labels=1.",
            )
        if any(self._model.prompts.values()):
            raise ConfigError(
                f"{path} has prompts, which are not supported for cross-encoders.", hint="Use another model."
            )
        self._tokenizer = self._model.tokenizer
        self._filler = int(self._tokenizer.pad_token_id or 0)
        self._typed = "token_type_ids" in self._tokenizer.model_input_names
        self.framing = int(self._tokenizer.num_special_tokens_to_add(pair=True))
        """Special tokens that every pair has."""
        self.max_tokens = longest_input(path, max_tokens, self._model.max_seq_length, section="serve.reranking")

    def tokenize(self, query: str, documents: Sequence[str], *, truncate: bool = False) -> list[Pair]:
        """The query with each document: whole, however long, or no more than the model reads, in which case the longer
        of the two is shortened first, as `CrossEncoder.predict` does."""
        read = self._tokenizer(
            [query] * len(documents),
            list(documents),
            truncation="longest_first" if truncate else False,
            max_length=self.max_tokens if truncate else None,
            return_attention_mask=False,
            return_token_type_ids=True,
            verbose=False,
        )
        return [
            Pair(np.asarray(ids, dtype=np.int32), np.asarray(types, dtype=np.int32))
            for ids, types in zip(read["input_ids"], read["token_type_ids"], strict=True)
        ]

    def count(self, text: str) -> int:
        """Tokens of one text by itself, without special ones."""
        read = self._tokenizer(text, add_special_tokens=False, verbose=False)
        return len(read["input_ids"])

    @torch.inference_mode()
    def score(self, pairs: Sequence[Pair]) -> Vectors:
        """Scores [N, 1] float32 of N pairs, in one forward pass padded to the longest."""
        side = self._tokenizer.padding_side
        ids, mask = padded([pair.ids for pair in pairs], filler=self._filler, side=side)
        features = {"input_ids": ids, "attention_mask": mask}
        if self._typed:
            features["token_type_ids"], _ = padded([pair.types for pair in pairs], filler=0, side=side)
        made = self._model({name: torch.from_numpy(one).to(self._model.device) for name, one in features.items()})
        # In float32 before the activation: bfloat16 would make many good documents equal.
        scores = self._model.activation_fn(made["scores"].float())
        return np.asarray(scores.reshape(len(pairs), 1).cpu().numpy(), dtype=np.float32)
