"""What a run has learnt, in the form that others load: the adapter, the base with it merged, or the whole model."""

from pathlib import Path

import pyarrow as pa
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from actors.training import engine
from actors.training.batching import MicroBatch
from actors.training.checkpoint import manifest
from actors.training.checkpoint.export import export
from actors.training.checkpoint.manifest import Checkpoint
from actors.training.checkpoint.saver import ModelFacts
from actors.training.checkpoint.storage import FolderStorage
from actors.training.job import Outcome
from actors.training.layout import Layout
from actors.training.loop import train
from actors.training.objectives import sft
from cluster.errors import ConfigError, TrainingError
from tests.actors.training import saved
from tests.actors.training.small import HERE, VOCABULARY, Remembered, job, memory_feed, settings


@pytest.fixture(scope="module")
def runs(tiny_base: Path, rows: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Outcome, Path]]:
    """Two steps of a run that learns an adapter, and of one in which all weights learn."""
    made = {}
    for kind in ("lora", "none"):
        folder = tmp_path_factory.mktemp(kind)
        config = settings(adapter={"kind": kind, "r": 4, "alpha": 8}, steps=2)
        outcome = train(job(config, tiny_base, folder, rows.num_rows), HERE, memory_feed(rows), Remembered())
        assert isinstance(outcome, Outcome)
        made[kind] = (outcome, folder)
    return made


def last(folder: Path) -> tuple[FolderStorage, Checkpoint]:
    storage = FolderStorage(folder)
    return storage, manifest.find(storage, None, run_id="tiny-1")


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        answer: torch.Tensor = model.eval()(torch.arange(1, 20)[None] % VOCABULARY).logits
    return answer


def test_an_adapter_is_what_the_run_has_learnt(
    runs: dict[str, tuple[Outcome, Path]], tiny_base: Path, tmp_path: Path
) -> None:
    outcome, folder = runs["lora"]
    (folder / "step-000002" / "adapter" / "stray").mkdir()  # by whoever: it is no part of the checkpoint
    assert export(*last(folder), tmp_path / "adapter") == "adapter"
    (folder / "step-000002" / "adapter" / "stray").rmdir()
    base = AutoModelForCausalLM.from_pretrained(tiny_base)
    before = logits(base)
    adapted = logits(PeftModel.from_pretrained(base, tmp_path / "adapter"))
    assert not torch.allclose(adapted, before)
    assert (outcome.adapter / "adapter_config.json").read_bytes() == (
        tmp_path / "adapter" / "adapter_config.json"
    ).read_bytes()

    what = export(*last(folder), tmp_path / "merged", merged=True, base=lambda *_: tiny_base)
    assert what == "merged"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), adapted, rtol=1e-4, atol=1e-4)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_whole_model_is_what_the_run_has_learnt(
    runs: dict[str, tuple[Outcome, Path]], tiny_base: Path, tmp_path: Path
) -> None:
    outcome, folder = runs["none"]
    assert export(*last(folder), tmp_path / "model", base=lambda *_: tiny_base) == "model"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert not torch.allclose(logits(model), logits(AutoModelForCausalLM.from_pretrained(tiny_base)))
    # What the run hands over at its end is the same.
    assert outcome.adapter == folder / "export-step-000002"
    assert (outcome.adapter / "model.safetensors").read_bytes() == (tmp_path / "model/model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="no adapter to merge"):
        export(*last(folder), tmp_path / "merged", merged=True, base=lambda *_: tiny_base)


def test_a_whole_mixture_has_the_names_that_transformers_reads(
    tiny_mixture: Path, rows: pa.Table, tmp_path: Path
) -> None:
    """In training the experts of a layer are one tensor each of two kinds; in files each has matrices of its own."""
    trained = engine.build(settings(adapter={"kind": "none"}), tiny_mixture, "tiny", HERE, Layout())
    batch = MicroBatch.from_arrow(rows.slice(0, 4))
    trained.step([batch], loss_tokens=sft.count_loss_tokens(batch), learning_rate=1e-2)
    mine = saved.checkpoints(tmp_path / "run", model=ModelFacts("model", "tiny", "ab" * 32, None))
    saved.save(mine, 1, state=lambda _: trained.state())
    assert export(*last(tmp_path / "run"), tmp_path / "model", base=lambda *_: tiny_mixture) == "model"
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    wanted = whole_rows(trained.model)
    torch.testing.assert_close(whole_rows(found), wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(wanted, whole_rows(AutoModelForCausalLM.from_pretrained(tiny_mixture)), atol=1e-2)


def whole_rows(model: torch.nn.Module) -> torch.Tensor:
    """`logits` of a model in training too, whose attention wants positions."""
    ids = torch.arange(1, 20)[None] % VOCABULARY
    with torch.no_grad():
        answer: torch.Tensor = model.eval()(ids, position_ids=torch.arange(19)[None]).logits
    return answer


def test_what_cannot_be_exported_leaves_nothing_behind(
    runs: dict[str, tuple[Outcome, Path]], tiny_base: Path, tmp_path: Path
) -> None:
    _, folder = runs["lora"]
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        export(*last(folder), tmp_path / "there")
    with pytest.raises(ConfigError, match="no checkpoint of step 7"):
        manifest.find(FolderStorage(folder), 7, run_id="tiny-1")
    path = folder / "step-000002" / "adapter" / "adapter_model.safetensors"
    before = path.read_bytes()
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    try:
        for merged in (False, True):
            with pytest.raises(TrainingError, match=r"adapter_model\.safetensors"):
                export(*last(folder), tmp_path / "new", merged=merged, base=lambda *_: tiny_base)
    finally:
        path.write_bytes(before)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
