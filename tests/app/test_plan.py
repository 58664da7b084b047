"""The plan's arithmetic against figures worked by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from actors.training.shape import read
from app import recipe as recipes
from app.pipelines import calibration, plan
from cluster.storage import Home


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One layer: embedding 10×4, one 6×4 linear, one norm."""
    save_file(
        {
            "model.embed_tokens.weight": np.zeros((10, 4), np.float32),
            "model.layers.0.mlp.up_proj.weight": np.zeros((6, 4), np.float32),
            "model.norm.weight": np.zeros((4,), np.float32),
        },
        tmp_path / "model.safetensors",
    )
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "hidden_size": 4, "vocab_size": 10}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 2, "tie_word_embeddings": True}))
    return tmp_path


HERE = plan.Room(gib=8.0, ranks=2, where="for the test")


def test_a_plan_says_what_a_run_needs(tmp_path: Path, model: Path) -> None:
    recipe = recipes.load("error-triage", [f"model.base={model}", "adapter.r=2", "data.max_length=128"])
    lines = {line.name: line for line in plan.plan(recipe, Home(tmp_path / "home"), tmp_path, HERE)}
    assert lines["memory"].status == "ok"
    assert lines["memory"].found.startswith("fits: ")
    assert lines["checkpoint"].found.startswith("0.00 GiB each, every 20 steps")
    assert lines["time"].status == "warn"


def test_what_does_not_fit_names_the_cheapest_change_that_does(tmp_path: Path, model: Path) -> None:
    recipe = recipes.load("error-triage", [f"model.base={model}", "optimizer.micro_batch_size=2"])
    need = plan.memory(recipe, read(model), HERE).peak / plan.GIB
    tight = plan.Room(gib=0.9 * need * 2, ranks=2, where="for the test")
    lines = {line.name: line for line in plan.plan(recipe, Home(tmp_path / "home"), tmp_path, tight)}
    assert lines["memory"].status == "red"
    assert lines["memory"].advice.endswith("--set optimizer.micro_batch_size=1")


def test_nothing_makes_it_fit_into_nothing(tmp_path: Path, model: Path) -> None:
    recipe = recipes.load("error-triage", [f"model.base={model}"])
    nothing = plan.Room(gib=0.0, ranks=2, where="for the test")
    lines = {line.name: line for line in plan.plan(recipe, Home(tmp_path / "home"), tmp_path, nothing)}
    assert "smaller base" in lines["memory"].advice


def test_the_time_is_that_of_the_newest_run_of_the_kind(tmp_path: Path, model: Path) -> None:
    home = Home(tmp_path / "home")
    recipe = recipes.load("error-triage", [f"model.base={model}", "steps=50", "data.max_length=256"])
    calibration.record(home, recipe, read(model), length=256, tokens_per_s=1024.0, run="before-1")
    lines = {line.name: line for line in plan.plan(recipe, home, tmp_path, HERE)}
    # 50 steps of 4 rows of 256 tokens at 1024 tokens/s
    assert lines["time"].found.startswith("about 0:00:50")
    assert "before-1" in lines["time"].found
    other = recipes.load("error-triage", [f"model.base={model}", "precision=fp32"])
    assert calibration.known(home, other) is None


def test_a_mesh_that_cuts_heads_is_red(tmp_path: Path, model: Path) -> None:
    workers = ["parallel.workers.min=2", "parallel.workers.max=2"]
    for axis, status, found in (
        ("parallel.tensor=2", "ok", "ddp, tensor 2"),
        ("parallel.strategy=fsdp", "ok", "fsdp, shard 2"),
        ("parallel.pipeline=2", "red", "A model of 1 layers cannot be cut into 2 stages."),
    ):
        recipe = recipes.load("error-triage", [f"model.base={model}", *workers, axis])
        lines = {line.name: line for line in plan.plan(recipe, Home(tmp_path / "home"), tmp_path, HERE)}
        assert (lines["mesh"].status, lines["mesh"].found) == (status, found)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 1}))
    recipe = recipes.load("error-triage", [f"model.base={model}", *workers, "parallel.tensor=2"])
    lines = {line.name: line for line in plan.plan(recipe, Home(tmp_path / "home"), tmp_path, HERE)}
    assert lines["mesh"].found == "parallel.tensor 2 does not divide the model's num_key_value_heads 1."
    assert lines["batch"].found.startswith("4 sequences = 1 groups of 2 workers × 1 × 4 accumulated")


def test_upload_counts_what_ray_would_send(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("# built\nbuild/\n*.bin\n")
    for name, size in (("a.py", 10), ("big.bin", 1000), ("build/x", 1000), (".venv/y", 1000), ("src/b.py", 20)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * size)
    files = {str(path): size for size, path in plan.upload_bytes(tmp_path)}
    assert files == {"a.py": 10, "src/b.py": 20, ".gitignore": 21}


def test_a_plan_names_batch_data_and_disk(tmp_path: Path) -> None:
    lines = {line.name: line for line in plan.plan(recipes.load("error-triage"), Home(tmp_path), tmp_path)}
    assert lines["batch"].found.startswith("4 sequences = 2 workers × 1 × 2 accumulated")
    assert "mined" in lines["data"].found
    assert lines["model"].status == "warn"
    assert lines["disk"].status in {"ok", "red"}


def test_a_source_that_is_not_there_is_red(tmp_path: Path) -> None:
    recipe = recipes.load("error-triage", ["data.train.source=/no/such.jsonl"])
    line = next(line for line in plan.plan(recipe, Home(tmp_path), tmp_path) if line.name == "data")
    assert line.status == "red"
    assert "python-errors" in line.advice


def test_a_model_that_is_not_there_or_is_no_language_model_is_red(tmp_path: Path) -> None:
    embedder = tmp_path / "embedder"
    embedder.mkdir()
    (embedder / "modules.json").write_text("[]")
    save_file({"w": np.zeros((2, 2), np.float32)}, embedder / "model.safetensors")
    for base, part in (
        ("/no/such/model", "/no/such/model"),
        ("smollm2-135m-instuct", "smollm2-135m-instuct"),
        (str(embedder), "makes embeddings"),
    ):
        recipe = recipes.load("error-triage", [f"model.base={base}"])
        line = next(line for line in plan.plan(recipe, Home(tmp_path), tmp_path) if line.name == "model")
        assert line.status == "red"
        assert part in line.found


def test_a_hub_id_is_not_taken_for_the_stored_model_of_its_last_name(tmp_path: Path, model: Path) -> None:
    home = Home(tmp_path / "home")
    (home.models / "smollm2-135m-instruct").mkdir(parents=True)
    recipe = recipes.load("error-triage", ["model.base=Someone/SmolLM2-135M-Instruct"])
    line = next(line for line in plan.plan(recipe, home, tmp_path) if line.name == "model")
    assert line.status == "warn"
    assert "not in the store" in line.found


def test_every_source_of_a_recipe_is_looked_at(tmp_path: Path) -> None:
    recipe = recipes.load("error-triage", ["data.eval.source=/no/eval.jsonl", "index.source=/no/index.jsonl"])
    status = {line.name: line.status for line in plan.plan(recipe, Home(tmp_path), tmp_path)}
    assert (status["data"], status["evaluation data"], status["index"]) == ("ok", "red", "red")


def test_odd_files_in_the_folder_do_not_end_a_plan(tmp_path: Path, model: Path) -> None:
    (tmp_path / ".gitignore").write_bytes(b"caf\xe9\n")
    (model / "model.safetensors").write_bytes(b"broken")
    (model / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"], "n_layer": 2}')
    recipe = recipes.load("error-triage", [f"model.base={model}"])
    line = next(line for line in plan.plan(recipe, Home(tmp_path / "home"), tmp_path) if line.name == "model")
    assert line.status == "warn"
    assert "cannot be read" in line.found
