"""An embedder's vectors from Ray workers, and base, candidate and champion measured with them."""

import json
import uuid
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import ray
from ray.util import placement_group, remove_placement_group

from actors.data import examples
from actors.data.build import build
from actors.data.config import DataConfig, NegativesConfig, SourceConfig
from actors.data.examples import PairExample
from actors.data.pairs import prepare_pairs
from actors.evaluation import embedding, negatives, retrieval
from actors.evaluation.config import EvaluateConfig, RetrievalConfig
from actors.evaluation.evaluate import Champion
from actors.training import embedder
from cluster.errors import CapacityError
from cluster.models import obtain
from cluster.progress import Progress
from cluster.session import Session
from cluster.storage import Home
from tests.actors.training.pairs import texts, write_embedder

pytestmark = pytest.mark.integration

TEXTS = [*texts(600), " ".join(["w9", "w8"] * 14)]
PAIRS = [PairExample(text, text, other, f"g{n % 9}") for n, (text, other) in enumerate(pairwise(TEXTS))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedder(tmp_path_factory.mktemp("embedder") / "tiny-embedder")


def test_vectors_come_in_the_order_of_their_texts_and_read_as_far_as_told(
    ray_session: Session, home: Home, folder: Path
) -> None:
    found = embedding.embed(obtain(str(folder), home), TEXTS, home, max_tokens=12)
    model = embedder.load(folder)
    model.max_seq_length = 12
    np.testing.assert_allclose(found, model.encode(TEXTS, normalize_embeddings=True), atol=1e-5)
    model.max_seq_length = 32
    whole = model.encode(TEXTS[-1], normalize_embeddings=True)
    assert not np.allclose(found[-1], whole, atol=1e-3)


def test_base_candidate_and_champion_search_one_pool(
    ray_session: Session, home: Home, folder: Path, tmp_path: Path
) -> None:
    """All three are one model here, so that nothing is lifted and nobody's alias is taken."""
    config = EvaluateConfig(suites=("retrieval",), retrieval=RetrievalConfig(pool=100, dims=(8,)))
    told: list[Progress] = []
    champion = Champion("tiny/1", write_embedder(tmp_path / "champion"), "another base's digest", whole=True)
    report = retrieval.evaluate(
        config,
        base=obtain(str(folder), home),
        candidate=write_embedder(tmp_path / "candidate"),
        champion=champion,
        task=retrieval.task_of(PAIRS, pool=100, queries=40),
        home=home,
        sink=told.append,
    )
    assert (report.n, report.groups, report.pool, report.champion) == (40, 9, 100, "tiny/1")
    assert report.against == "the champion tiny/1"
    assert not report.verdict.passed
    assert [len(report.verdict.checks), *(one.dimension for one in report.lengths)] == [8, 32, 8]
    for one in report.lengths:
        assert one.scores["base"] == one.scores["candidate"] == one.scores["champion"]
    assert list(report.seconds) == ["base", "candidate", "champion"]
    assert {one.note for one in told} >= {"the workers of the champion start", "embedded by champion"}
    assert type(report).model_validate(report.model_dump(mode="json")) == report


def test_negatives_are_mined_into_a_version_of_their_own(
    ray_session: Session, home: Home, folder: Path, tmp_path: Path
) -> None:
    source = tmp_path / f"mined-{uuid.uuid4().hex[:6]}.jsonl"
    lines = [{"query": pair.query, "positive": pair.positive} for pair in PAIRS[:120]]
    lines[0]["negative"] = "w5"
    source.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    data = SourceConfig(source=str(source), limit=60)
    config = DataConfig(train=data, negatives=NegativesConfig(), near_duplicate_similarity=1.0, max_length=16)
    pairs = build(str(source), config, home)
    base = obtain(str(folder), home)
    mined = negatives.mine(pairs, config, base, home)
    assert (mined.parent, mined.stage, mined.shape, mined.splits["train"].rows) == (pairs.id, "examples", "pairs", 60)
    rows = [row for row in examples.read(mined, "train", home) if isinstance(row, PairExample)]
    positives = {row.positive for row in rows}
    assert sum(len(row.negatives) == 2 for row in rows) > 20
    for row in rows:
        assert {*row.negatives} - {"w5"} <= positives - {row.positive}
    assert [row.negatives for row in examples.read(mined, "test", home) if isinstance(row, PairExample)][1:5] == [
        ()
    ] * 4
    assert negatives.mine(pairs, config, base, home) == mined
    prepared = prepare_pairs(mined, config, folder, home, needs_negatives=True)
    assert prepared.splits["train"].rows == sum(bool(row.negatives) for row in rows)


def test_a_cluster_without_a_free_place_is_a_verdict(ray_session: Session, home: Home, folder: Path) -> None:
    held = placement_group([{"CPU": ray.available_resources()["CPU"]}])
    assert held.wait(30)
    try:
        with pytest.raises(CapacityError, match=r"found a place within 0.5 s: 0 of 8 CPU are free, it takes 1"):
            embedding.embed(obtain(str(folder), home), TEXTS, home, wait_s=0.5)
    finally:
        remove_placement_group(held)
