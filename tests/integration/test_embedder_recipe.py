"""A recipe that makes an embedder, from a file of pairs to a version that sentence-transformers loads."""

import io
import json
import random
import uuid
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sentence_transformers import SentenceTransformer

from actors.evaluation.retrieval import RetrievalReport
from actors.registry.client import RegistryClient
from app.cli import scores
from app.display import Display
from app.pipelines import evaluate, train
from app.recipe import Recipe
from cluster.config import parse
from cluster.errors import ConfigError
from cluster.session import Session
from cluster.storage import Home, digest_folder
from tests.actors.training.pairs import write_embedder

pytestmark = pytest.mark.integration

NAME = f"translated-words-{uuid.uuid4().hex[:6]}"
"""A home that is kept between sessions has the champions of earlier ones."""


def write_pairs(path: Path) -> Path:
    """Queries in the words w5 to w33; each is answered by the same words in another tongue, 29 numbers on.

    Random weights know nothing of it, and what a few steps teach of the words holds for pairs never seen.
    """
    draw = random.Random(1)
    rows: dict[str, str] = {}
    while len(rows) < 400:
        words = [draw.randrange(5, 34) for _ in range(4)]
        rows[" ".join(f"w{word}" for word in words)] = " ".join(f"w{word + 29}" for word in words)
    lines = [{"query": query, "positive": positive} for query, positive in rows.items()]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def recipe(folder: Path, **more: Any) -> Recipe:
    settings = {
        "name": NAME,
        "model": {"base": str(folder / "tiny-embedder")},
        "data": {
            "train": {"source": str(folder / "pairs.jsonl")},
            "test_fraction": 0.3,
            "max_length": 16,
            "near_duplicate_similarity": 1.0,
        },
        "objective": {"kind": "contrastive", "matryoshka": {"dims": [32, 16]}},
        "adapter": {"kind": "none"},
        "parallel": {"workers": {"min": 2, "max": 2}},
        "optimizer": {"learning_rate": 1e-2, "global_batch_size": 32, "micro_batch_size": 8},
        "precision": "fp32",
        "steps": 40,
        "evaluate": {"suites": ["retrieval"], "max_cases": 60, "retrieval": {"pool": 90, "dims": [16]}},
        "register": {"name": NAME, "on_pass": "champion"},
        **more,
    }
    return parse(Recipe, settings, source="the test")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedder")
    write_embedder(folder / "tiny-embedder")
    write_pairs(folder / "pairs.jsonl")
    return folder


def quiet() -> Display:
    return Display(Console(file=io.StringIO()))


@pytest.mark.timeout(480)
def test_a_recipe_makes_an_embedder_that_finds_more_than_its_base(
    ray_session: Session, registry: RegistryClient, home: Home, folder: Path
) -> None:
    turn = train.run(recipe(folder), home, quiet())
    assert isinstance(turn.report, RetrievalReport)
    assert turn.report.verdict.passed, turn.report.verdict.reason
    whole = turn.report.lengths[0]
    assert whole.lifts["base"]["recall@1"].low > 0.1
    assert turn.report.against == "the base: there is no champion yet"
    console = Console(file=io.StringIO(), width=200)
    scores.draw(console, turn.report, "Run")
    assert isinstance(console.file, io.StringIO)
    assert "60 held-out queries of 60 groups, among 90 documents" in console.file.getvalue()

    assert turn.registration is not None
    made = turn.registration.version
    assert (made.id, made.kind, made.base) == (f"{NAME}/1", "embedder", turn.base.name)
    assert made.metrics["embedder_recall_1"] == whole.scores["candidate"].metrics["recall@1"].value
    stored = home.versions / made.path
    assert digest_folder(stored) == made.digest
    assert SentenceTransformer(str(stored), device="cpu").encode("w5 w6").shape == (32,)
    chain = [link.kind for link in registry.lineage(made.id)]
    assert chain == ["data", "data", "run", "checkpoint", "evaluation", "version", "gate", "alias"]

    again = evaluate.run(recipe(folder), home, quiet(), reference=made.id, promote=False)
    assert again.report.against == f"the base: the candidate is the champion {made.id} itself"
    assert isinstance(again.report, RetrievalReport)
    assert again.report.lengths == turn.report.lengths


def test_what_cannot_be_measured_is_refused_before_the_training(
    ray_session: Session, registry: RegistryClient, home: Home, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=r"fewer than evaluate\.retrieval\.pool 5000"):
        train.run(recipe(folder, evaluate={"suites": ["retrieval"]}, register=None), home, quiet())
    with pytest.raises(ConfigError, match=r"objective\.kind contrastive teaches a sentence-embedder; .* causal-lm"):
        train.run(recipe(folder, model={"base": "smollm2-135m-instruct"}, register=None), home, quiet())
