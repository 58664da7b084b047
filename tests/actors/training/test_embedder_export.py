"""What a run of an embedder leaves is a folder that sentence-transformers loads, also where an adapter learned."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

from actors.training import embedder
from actors.training.job import Outcome
from actors.training.loop import train
from cluster.errors import ConfigError, TrainingError
from cluster.models import require_known_modules
from tests.actors.training.pairs import packed, texts
from tests.actors.training.small import HERE, Remembered, job, memory_feed, settings

WORDS = texts(32, seed=8)
ROWS: pa.Table = packed([WORDS[place : place + 2] for place in range(0, 32, 2)])


@pytest.mark.parametrize("kind", ["lora", "none"])
def test_it_is_loaded_by_sentence_transformers_and_has_learned(kind: str, tiny_embedder: Path, tmp_path: Path) -> None:
    config = settings(
        objective={"kind": "contrastive"},
        adapter={"kind": kind, "r": 4, "alpha": 8},
        optimizer={"learning_rate": 2e-2, "global_batch_size": 8, "micro_batch_size": 8},
        steps=16,
    )
    outcome = train(job(config, tiny_embedder, tmp_path, ROWS.num_rows), HERE, memory_feed(ROWS), Remembered())
    assert isinstance(outcome, Outcome)
    assert outcome.adapter == tmp_path / "export-step-000016"
    require_known_modules(outcome.adapter)
    assert not list(outcome.adapter.glob("adapter_*"))
    made, base = SentenceTransformer(str(outcome.adapter), device="cpu"), embedder.load(tiny_embedder)
    assert (made.max_seq_length, len(made)) == (base.max_seq_length, len(base))

    def right(model: SentenceTransformer) -> float:
        """How much nearer queries are to their own documents than to others'."""
        queries, documents = model.encode(WORDS[::2]), model.encode(WORDS[1::2])
        similar = queries @ documents.T
        return float(np.diag(similar).mean() - similar.mean())

    assert right(made) > right(base) + 0.05
    assert set(load_file(outcome.adapter / "model.safetensors")) >= {
        name.removeprefix("0.model.") for name, _ in made.named_parameters()
    }


def test_weights_of_another_model_are_refused(tiny_embedder: Path) -> None:
    weights = dict(embedder.load(tiny_embedder).named_parameters())
    name, values = weights.popitem()
    with pytest.raises(TrainingError, match="does not fit"):
        embedder.with_weights(tiny_embedder, {**weights, f"{name}s": values})


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[]")
    with pytest.raises(ConfigError, match="cannot be loaded as a sentence-transformers model"):
        embedder.load(tmp_path)
