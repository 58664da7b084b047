"""Contrastive learning of an embedder: what one step contrasts, and the sum of the losses of its queries.

A row of the feed is one packed sequence: a query, its positive, and its negatives if it has some. `position_ids` start
again at 0 with each text, and the label of every token is the number of its text: equal texts have equal numbers, in
the whole data version (`actors.data.pairs` packs them).

`ContrastiveObjective` embeds texts; it is a module, because DDP and FSDP hook into the forward of what they wrap. The
losses are functions of vectors, whoever computed them and on whichever rank. They give *sums*, as `sft` does; the loop
divides by the terms of the whole global batch. Nothing here knows workers, steps or the optimizer.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn import functional

from actors.training.batching import NO_LOSS, MicroBatch
from actors.training.config import ContrastiveConfig

ABSENT: Final = -1
"""Number of a text that is not there: rows have different numbers of negatives."""


@dataclass(frozen=True)
class Texts:
    """The N texts of some rows, in order. `places` [N]: 0 is a query, 1 its positive, from 2 on its negatives."""

    input_ids: torch.Tensor
    """[N, T] int64."""
    attention_mask: torch.Tensor
    """[N, T] int64."""
    numbers: torch.Tensor
    """[N] int64."""
    rows: torch.Tensor
    """[N] int64."""
    places: torch.Tensor


@dataclass(frozen=True)
class Documents:
    """What rows hold beside their queries. R rows of K documents each; the first is the positive."""

    vectors: torch.Tensor
    """[R, K, D] float32; zeros where `numbers` say ABSENT."""
    numbers: torch.Tensor
    """[R, K] int64."""
    queries: torch.Tensor
    """[R] int64: the number of each row's query."""


def unpacked(input_ids: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor) -> Texts:
    """The texts in rows [B, L] int64. A row without a query and a positive is a `ValueError`."""
    content = labels != NO_LOSS
    starts = content & (position_ids == 0)
    per_row = starts.sum(1)
    if len(per_row) and int(per_row.min()) < 2:
        raise ValueError("a row has no query and positive")
    number = starts.flatten().cumsum(0).view_as(starts)[content] - 1
    place = position_ids[content]
    shape = (int(per_row.sum()), int(place.max()) + 1)
    ids, mask = input_ids.new_zeros(shape), input_ids.new_zeros(shape)
    ids[number, place] = input_ids[content]
    mask[number, place] = 1
    rows = torch.arange(len(labels), device=labels.device).repeat_interleave(per_row)
    firsts = per_row.cumsum(0) - per_row
    places = torch.arange(shape[0], device=labels.device) - firsts[rows]
    return Texts(ids, mask, labels[starts], rows, places)


def count_pairs(batch: MicroBatch) -> int:
    """Terms that `multiple_negatives` has for `batch`: one for each query."""
    return len(batch.labels)


def count_triplets(batch: MicroBatch) -> int:
    """Terms that `triplet` has for `batch`: one for each negative."""
    texts = int(((batch.labels != NO_LOSS) & (batch.position_ids == 0)).sum())
    return texts - 2 * len(batch.labels)


def arranged(vectors: torch.Tensor, texts: Texts, *, width: int) -> tuple[torch.Tensor, Documents]:
    """[R, D] vectors of the queries, and the documents of the same rows, `width` to a row. Differentiable."""
    asked, told = texts.places == 0, texts.places > 0
    queries, place = vectors[asked], (texts.rows[told], texts.places[told] - 1)
    shape = (len(queries), width)
    documents = vectors.new_zeros(*shape, vectors.shape[-1]).index_put(place, vectors[told])
    numbers = texts.numbers.new_full(shape, ABSENT).index_put(place, texts.numbers[told])
    return queries, Documents(documents, numbers, texts.numbers[asked])


def summed_loss(
    config: ContrastiveConfig, queries: torch.Tensor, documents: Documents, *, first: int = 0
) -> torch.Tensor:
    """The losses of `queries` [Q, D], those of the rows from `first` on, against `documents`; fp32 scalar.

    With Matryoshka the sum over its dims of weight × loss of the vectors cut there and normalised again.
    """
    if config.matryoshka is None:
        return _summed(config, queries, documents, first)
    dims = config.matryoshka.dims
    losses = [
        weight * _summed(config, _cut(queries, dim), Documents(_cut(documents.vectors, dim), *_ids(documents)), first)
        for dim, weight in zip(dims, config.matryoshka.weights or [1.0] * len(dims), strict=True)
    ]
    return torch.stack(losses).sum()


def multiple_negatives(queries: torch.Tensor, documents: Documents, *, scale: float, first: int = 0) -> torch.Tensor:
    """Summed cross-entropy of each query's positive among all documents, by cosine × `scale`.

    What is right for a query as well is masked, not punished: texts that are a positive of it in any row here, its own
    positive in another place, and the query itself.
    """
    own = torch.arange(first, first + len(queries), device=queries.device)
    width = documents.numbers.shape[1]
    flat = documents.vectors.flatten(0, 1)
    logits = scale * functional.normalize(queries, dim=-1) @ functional.normalize(flat, dim=-1).T  # [Q, R·K]
    told, asked = documents.numbers.flatten(), documents.queries[own]
    positives = _pairs(documents.queries, documents.numbers[:, 0])
    right = torch.isin(_pairs(asked[:, None], told[None, :]), positives) | (asked[:, None] == told[None, :])
    masked = right | (told == ABSENT)[None, :]
    target = own * width
    masked[torch.arange(len(queries), device=queries.device), target] = False
    return functional.cross_entropy(logits.masked_fill(masked, -torch.inf), target, reduction="sum")


def triplet(
    queries: torch.Tensor, documents: Documents, *, margin: float, distance: str, first: int = 0
) -> torch.Tensor:
    """Summed max(0, d(query, positive) - d(query, negative) + margin) over the negatives of each query's own row."""
    own = documents.vectors[first : first + len(queries)]
    there = documents.numbers[first : first + len(queries), 1:] != ABSENT
    near = _distance(queries, own[:, 0], distance)
    far = _distance(queries[:, None], own[:, 1:], distance)
    return (near[:, None] - far + margin).relu().masked_fill(~there, 0).sum()


def _summed(config: ContrastiveConfig, queries: torch.Tensor, documents: Documents, first: int) -> torch.Tensor:
    if config.loss == "triplet":
        margin, distance = config.margin or 0.2, config.distance or "cosine"
        return triplet(queries, documents, margin=margin, distance=distance, first=first)
    return multiple_negatives(queries, documents, scale=config.factor, first=first)


def _ids(documents: Documents) -> tuple[torch.Tensor, torch.Tensor]:
    return documents.numbers, documents.queries


def _cut(vectors: torch.Tensor, dim: int) -> torch.Tensor:
    return functional.normalize(vectors[..., :dim], dim=-1)


def _pairs(queries: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """One number for each (query, text): both are below 2^31, as the files hold them."""
    return queries * 2**32 + texts


def _distance(one: torch.Tensor, other: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "cosine":
        return 1 - functional.cosine_similarity(one, other, dim=-1)
    return functional.pairwise_distance(*torch.broadcast_tensors(one, other), p=2 if kind == "euclidean" else 1)


class ContrastiveObjective(torch.nn.Module):
    """`model` is a `SentenceTransformer`, its adapter in place: its own modules decide pooling and normalisation."""

    def __init__(self, model: Any, precision: str) -> None:
        super().__init__()
        self.model = model
        self.precision = precision

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """[N, D] float32: a vector for each text in the rows [B, L], in their order."""
        texts = unpacked(input_ids, labels, position_ids)
        asked = texts.places == 0
        vectors = None
        # Queries are short and documents long: padded together, most of a query would be padding.
        for chosen in (asked, ~asked):
            embedded = self._embed(texts.input_ids[chosen], texts.attention_mask[chosen])
            if vectors is None:
                vectors = embedded.new_zeros(len(asked), embedded.shape[-1])
            vectors = vectors.masked_scatter(chosen[:, None], embedded)
        assert vectors is not None
        return vectors

    def _embed(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        longest = int(attention_mask.sum(1).max())
        features = {"input_ids": input_ids[:, :longest], "attention_mask": attention_mask[:, :longest]}
        transformer, *rest = self.model
        with torch.autocast(input_ids.device.type, torch.bfloat16) if self.precision == "bf16" else nullcontext():
            features = transformer(features)
        # Sums over tokens in fp32, as whoever serves it takes them: pooled in bf16, vectors lose two digits.
        features["token_embeddings"] = features["token_embeddings"].float()
        for module in rest:
            features = module(features)
        return features["sentence_embedding"].float()
