"""The plan's arithmetic against figures worked by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from app import recipe as recipes
from app.pipelines import plan
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
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": 1, "hidden_size": 4, "num_attention_heads": 2})
    )
    return tmp_path


def test_shape_is_read_from_headers(model: Path) -> None:
    shape = plan.read_shape(model)
    assert shape.parameters == 40 + 24 + 4
    assert shape.matrices == ((6, 4),)


def test_lora_trains_r_times_in_plus_out(model: Path) -> None:
    recipe = recipes.load("error-triage", ["adapter.r=2"])
    assert plan.trainable(recipe, plan.read_shape(model)) == 2 * (6 + 4)


@pytest.mark.parametrize(("strategy", "shards"), [("ddp", 1), ("fsdp", 2)])
def test_a_frozen_base_costs_its_weights_and_an_adapter_sixteen_bytes(strategy: str, shards: int) -> None:
    # 2^30 frozen parameters in bf16, and 2·(2^28 + 2^28) = 2^30 trained ones: 4 + 4 + 8 bytes each.
    shape = plan.Shape(parameters=1 << 30, layers=1, hidden=1, heads=1, matrices=((1 << 28, 1 << 28),))
    recipe = recipes.load("error-triage", ["adapter.r=2", f"parallel.strategy={strategy}"])
    need = plan.memory(recipe, shape)
    assert need.weights_gib == pytest.approx((2 + 4) / shards)
    assert need.gradients_gib == pytest.approx(4 / shards)
    assert need.optimizer_gib == pytest.approx(8 / shards)


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
