"""What one step contrasts: losses and gradients are sentence-transformers' own, and what is right is no negative."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses

from actors.training import embedder
from actors.training.batching import MicroBatch
from actors.training.config import ContrastiveConfig, TrainConfig
from actors.training.objectives import contrastive
from actors.training.objectives.contrastive import ContrastiveObjective, Documents
from tests.actors.training.pairs import packed, texts

PLAIN = texts(24, seed=1)
TRIPLES = [PLAIN[place : place + 3] for place in range(0, 24, 3)]
Loss = Callable[[SentenceTransformer], Any]


def ours(folder: Path, rows: Sequence[Sequence[str]], **settings: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss over the terms of `rows`, and its gradients by parameter."""
    config = ContrastiveConfig(kind="contrastive", **settings)
    model = embedder.load(folder).eval()
    batch = MicroBatch.from_arrow(packed(rows))
    given = contrastive.unpacked(batch.input_ids, batch.labels, batch.position_ids)
    vectors = ContrastiveObjective(model, "fp32")(batch.input_ids, batch.labels, batch.position_ids)
    queries, documents = contrastive.arranged(vectors, given, width=int(given.places.max()))
    terms = contrastive.count_triplets(batch) if config.loss == "triplet" else contrastive.count_pairs(batch)
    loss = contrastive.summed_loss(config, queries, documents) / terms
    loss.backward()
    return loss.item(), gradients(model)


def theirs(folder: Path, rows: Sequence[Sequence[str]], loss: Loss) -> tuple[float, dict[str, torch.Tensor]]:
    model = embedder.load(folder).eval()
    features = [model.tokenize(list(column)) for column in zip(*rows, strict=True)]
    value = loss(model)(features, None)
    value.backward()
    return value.item(), gradients(model)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        ({}, losses.MultipleNegativesRankingLoss),
        ({"temperature": 0.1}, lambda model: losses.MultipleNegativesRankingLoss(model, scale=10.0)),
        ({"scale": 20.0}, lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3)),
        (
            {"loss": "triplet", "margin": 0.5},
            lambda model: losses.TripletLoss(model, losses.TripletDistanceMetric.COSINE, triplet_margin=0.5),
        ),
        ({"loss": "triplet", "margin": 5.0, "distance": "euclidean"}, losses.TripletLoss),
        (
            {"loss": "triplet", "margin": 1.0, "distance": "manhattan"},
            lambda model: losses.TripletLoss(model, losses.TripletDistanceMetric.MANHATTAN, triplet_margin=1.0),
        ),
        (
            {"matryoshka": {"dims": [32, 8], "weights": [1.0, 0.5]}},
            lambda model: losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), [32, 8], [1, 0.5]),
        ),
        (
            {"loss": "triplet", "margin": 5.0, "distance": "euclidean", "matryoshka": {"dims": [16, 4]}},
            lambda model: losses.MatryoshkaLoss(model, losses.TripletLoss(model), [16, 4]),
        ),
    ],
    ids=["infonce", "temperature", "cached", "cosine", "euclidean", "manhattan", "matryoshka", "matryoshka-triplet"],
)
def test_losses_and_gradients_are_those_of_sentence_transformers(
    tiny_embedder: Path, settings: dict[str, Any], loss: Loss
) -> None:
    value, found = ours(tiny_embedder, TRIPLES, **settings)
    expected, wanted = theirs(tiny_embedder, TRIPLES, loss)
    assert value == pytest.approx(expected, rel=1e-5)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def pool(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, Documents]:
    """Random vectors for rows of text numbers: a query, its positive, its negatives (as many in each row)."""
    torch.manual_seed(3)
    by_number = torch.nn.functional.normalize(torch.randn(20, 8), dim=-1)
    numbers = torch.tensor(rows)
    return by_number[numbers[:, 0]], Documents(by_number[numbers[:, 1:].clamp(min=0)], numbers[:, 1:], numbers[:, 0])


def loss_of(rows: Sequence[Sequence[int]]) -> float:
    return contrastive.multiple_negatives(*pool(rows), scale=5.0).item()


@pytest.mark.parametrize(
    "rows",
    [[(0, 1), (2, 1)], [(0, 1), (0, 2)], [(0, 1), (1, 0)]],
    ids=["one positive of two queries", "two positives of one query", "each other's"],
)
def test_what_is_right_as_well_is_no_negative(rows: list[tuple[int, ...]]) -> None:
    assert loss_of(rows) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("text", [1, 0, -1], ids=["the positive", "the query", "absent"])
def test_a_negative_that_is_none_changes_nothing(text: int) -> None:
    assert loss_of([(0, 1, 5, text)]) == pytest.approx(loss_of([(0, 1, 5)]), rel=1e-6)
    assert loss_of([(0, 1, 5, 7)]) > loss_of([(0, 1, 5)])


def test_a_negative_that_is_a_positive_of_the_query_in_another_row_is_masked() -> None:
    masked = loss_of([(0, 1, 2), (0, 2, 5)])
    wanted = loss_of([(0, 1, -1), (0, 2, 5)])
    assert masked == pytest.approx(wanted, rel=1e-6)


def test_texts_come_back_from_their_row_whatever_their_number() -> None:
    batch = MicroBatch.from_arrow(packed([PLAIN[:2], PLAIN[2:6], [PLAIN[6], PLAIN[1], PLAIN[0]]]))
    given = contrastive.unpacked(batch.input_ids, batch.labels, batch.position_ids)
    assert given.rows.tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert given.places.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 2]
    assert given.numbers.tolist() == [0, 1, 2, 3, 4, 5, 6, 1, 0]
    words = [
        f"{' '.join(f'w{one}' for one in ids[1 : size - 1])}"
        for ids, size in zip(given.input_ids.tolist(), given.attention_mask.sum(1).tolist(), strict=True)
    ]
    assert words == [*PLAIN[:7], PLAIN[1], PLAIN[0]]
    assert (contrastive.count_pairs(batch), contrastive.count_triplets(batch)) == (3, 3)
    assert batch.tokens == int(given.attention_mask.sum())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"objective": {"kind": "contrastive", "margin": 0.3}}, "margin 0.3 is of loss triplet"),
        ({"objective": {"kind": "contrastive", "loss": "triplet", "scale": 3}}, "scale 3.0 is of loss multiple_neg"),
        ({"objective": {"kind": "contrastive", "scale": 3, "temperature": 1}}, "leave one out"),
        ({"objective": {"kind": "contrastive", "matryoshka": {"dims": [8, 8]}}}, "name a length twice"),
        ({"objective": {"kind": "contrastive", "matryoshka": {"dims": [8], "weights": [1, 2]}}}, "2 weights for 1 dim"),
        ({"objective": {"kind": "contrastive", "temperatur": 1}}, "temperatur"),
        ({"objective": {"kind": "dpo"}}, "use sft or contrastive"),
        (
            {"objective": {"kind": "contrastive"}, "parallel": {"tensor": 2, "workers": {"min": 2, "max": 2}}},
            r"parallel\.tensor 2 with objective contrastive: set tensor to 1",
        ),
        ({"objective": {"kind": "contrastive"}, "parallel": {"strategy": "zero2"}}, "use ddp, or fsdp"),
        ({"objective": {"kind": "contrastive"}, "compile": True}, "compile with objective contrastive"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TrainConfig.model_validate(settings)


def test_an_objective_without_a_kind_is_what_it_was() -> None:
    assert TrainConfig.model_validate({"objective": {}}).objective.kind == "sft"
    assert TrainConfig().objective.kind == "sft"
