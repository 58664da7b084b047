"""The plan's arithmetic against figures worked by hand."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from actors.training.shape import read
from app import recipe as recipes
from app.cli import plan as command
from app.pipelines import calibration, plan
from cluster.errors import ConfigError
from cluster.session import default_cpus
from cluster.storage import Home
from tests.actors.training.pairs import write_embedder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One layer: embedding 10×4, two linear layers of 4×4 and 6×4, one norm."""
    save_file(
        {
            "model.embed_tokens.weight": np.zeros((10, 4), np.float32),
            "model.layers.0.self_attn.q_proj.weight": np.zeros((4, 4), np.float32),
            "model.layers.0.mlp.up_proj.weight": np.zeros((6, 4), np.float32),
            "model.norm.weight": np.zeros((4,), np.float32),
        },
        tmp_path / "model.safetensors",
    )
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "hidden_size": 4, "vocab_size": 10}
    more = {"model_type": "llama", "num_attention_heads": 2, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


HERE = plan.Room(gib=8.0, where="for the test")


def test_a_plan_says_what_a_run_needs(tmp_path: Path, model: Path) -> None:
    recipe = recipes.load("error-triage", [f"model.base={model}", "adapter.r=2", "data.max_length=128"])
    lines = {line.name: line for line in plan.plan(recipe, Home(tmp_path / "home"), tmp_path, HERE)}
    assert lines["memory"].status == "ok"
    assert lines["memory"].found.startswith("fits: ")
    assert lines["checkpoint"].found.startswith("0.00 GiB each, every 20 steps")
    assert lines["time"].status == "warn"


def test_what_does_not_fit_names_the_cheapest_change_that_does(tmp_path: Path, model: Path) -> None:
    recipe = recipes.load("error-triage", [f"model.base={model}", "optimizer.micro_batch_size=2"])
    need = plan.need(recipe, read(model), HERE).bytes / plan.GIB - plan.LIBRARIES_GIB
    tight = plan.Room(gib=(plan.LIBRARIES_GIB + 0.9 * need) * 2, where="for the test")
    lines = {line.name: line for line in plan.plan(recipe, Home(tmp_path / "home"), tmp_path, tight)}
    assert lines["memory"].status == "red"
    assert lines["memory"].advice.endswith("--set optimizer.micro_batch_size=1.")


def test_nothing_makes_it_fit_into_nothing(tmp_path: Path, model: Path) -> None:
    recipe = recipes.load("error-triage", [f"model.base={model}"])
    nothing = plan.Room(gib=0.0, where="for the test")
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
    # Neither other arithmetic, nor a GPU, nor workers that share the same cores among more of them.
    for changes in (["precision=fp32"], ["parallel.workers.min=1", "parallel.workers.max=1"], ["compile=true"]):
        assert calibration.known(home, recipes.load("error-triage", [f"model.base={model}", *changes])) is None
    assert calibration.known(home, recipe, on_gpu=True) is None
    there = {line.name: line for line in plan.plan(recipe, home, tmp_path, plan.Room(80, "there", on_gpu=True))}
    assert there["time"].found.startswith("unknown")


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


def test_workers_that_this_machine_cannot_place_are_red(tmp_path: Path, model: Path) -> None:
    most = default_cpus()

    def placement(workers: int, room: plan.Room) -> plan.Line | None:
        size = f"parallel.workers={{min: {workers}, max: {workers}}}"
        return lines(tmp_path, model, room, size, f"optimizer.global_batch_size={workers}").get("placement")

    red = placement(most + 1, plan.Room(1000, "here"))
    assert red is not None
    assert red.status == "red"
    assert red.found.startswith(f"{most + 1} workers of 1 CPU each cannot be placed")
    assert red.found.endswith(f"has {most} CPUs")
    assert "parallel.workers.min" in red.advice
    assert placement(most, plan.Room(1000, "here")) is None
    assert placement(most + 1, gpu(1000)) is None, "the GPUs are another machine's"


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


def test_an_embedder_is_a_base_for_what_is_contrasted_and_for_nothing_else(tmp_path: Path, model: Path) -> None:
    embedder = write_embedder(tmp_path / "embedder")
    home = Home(tmp_path / "home")

    def planned(*settings: str) -> dict[str, plan.Line]:
        recipe = recipes.load("code-search", ["objective.matryoshka=null", *settings])
        return {line.name: line for line in plan.plan(recipe, home, tmp_path)}

    found = planned(f"model.base={embedder}")
    assert found["model"].status == "ok"
    assert found["memory"].found == "memory and time of an embedder are not estimated"
    assert found["batch"].found == "64 pairs, each contrasted with all others = 2 workers × 32 × 1"
    assert "embedded twice" in planned(f"model.base={embedder}", "optimizer.micro_batch_size=8")["batch"].found
    refused = planned(f"model.base={model}")["model"]
    assert (refused.status, refused.found) == ("red", f"{model} makes no embeddings")


def test_a_base_without_a_tokenizer_is_red(tmp_path: Path, model: Path) -> None:
    assert "tokenizer" not in lines(tmp_path, model, HERE)
    (model / "tokenizer.json").unlink()
    missing = lines(tmp_path, model, HERE)["tokenizer"]
    assert missing.status == "red"
    assert missing.found == f"{model} has no tokenizer"


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
    assert line.status == "red"
    assert "cannot be read" in line.found


LLAMAS = {
    "1b": {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32},
    "7b": {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    "70b": {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
}


def holes(folder: Path, size: str) -> Path:
    """A Llama of 1, 8 or 70 billion parameters in bf16, whose weights are a file of holes."""
    facts = {"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": size == "1b", **LLAMAS[size]}
    hidden, inner = facts["hidden_size"], facts["intermediate_size"]
    narrow = 8 * hidden // facts["num_attention_heads"]
    shapes = {"model.embed_tokens": [128256, hidden], "model.norm": [hidden]}
    if size != "1b":
        shapes["lm_head"] = [128256, hidden]
    for number in range(facts["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        shapes |= {f"{layer}.self_attn.{name}_proj": [hidden, hidden] for name in "qo"}
        shapes |= {f"{layer}.self_attn.{name}_proj": [narrow, hidden] for name in "kv"}
        shapes |= {f"{layer}.mlp.{name}_proj": [inner, hidden] for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": [hidden, inner], f"{layer}.input_layernorm": [hidden]}
        shapes |= {f"{layer}.post_attention_layernorm": [hidden]}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    facts |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


def lines(folder: Path, base: Path, room: plan.Room, *assignments: str) -> dict[str, plan.Line]:
    more = [f"model.base={base}", "data.max_length=2048", "serve=null", *assignments]
    return {line.name: line for line in plan.plan(recipes.load("error-triage", more), Home(folder), folder, room)}


def gpu(gib: float) -> plan.Room:
    return plan.Room(gib, "on each GPU", on_gpu=True)


FULL = "adapter.kind=none"
MORE = "parallel.workers.max"


@pytest.mark.parametrize(
    ("size", "gib", "learns", "proposals"),
    [
        ("1b", 80, "", []),
        ("1b", 8, "", [["activation_checkpointing=true"]]),
        # 16 bytes for each of 8.03 B parameters: 60 GiB on each of two, and activations; as an adapter 15 and less.
        ("7b", 80, FULL, [["parallel.strategy=fsdp", "activation_checkpointing=true"]]),
        ("7b", 24, FULL, [["activation_checkpointing=true", "adapter.kind=lora"], ["16"]]),
        ("7b", 8, "", [["4"]]),
        ("70b", 80, "", [["parallel.strategy=fsdp", "activation_checkpointing=true", "data.max_length=1024"], ["4"]]),
        ("70b", 8, FULL, []),
    ],
)
def test_what_is_advised_fits_when_it_is_done(
    tmp_path: Path, size: str, gib: float, learns: str, proposals: list[list[str]]
) -> None:
    base, asked = holes(tmp_path / size, size), [learns] if learns else []
    memory = lines(tmp_path, base, gpu(gib), *asked)["memory"]
    assert (memory.status == "red") is bool(memory.advice)
    found = [re.findall(r"--set (\S+?)(?=\.? |\.?$)", each) for each in re.split(r"As it is", memory.advice)]
    found = [each for each in found if each]
    for advised in found:
        done = lines(tmp_path, base, gpu(gib), *asked, *advised)
        assert (done["memory"].status, done["mesh"].status) == ("ok", "ok")
    workers = [[each.partition("=")[2] for each in some if each.startswith(MORE)] or some for some in found]
    assert workers == proposals


def test_a_run_that_may_shrink_must_fit_when_it_has_shrunk(tmp_path: Path) -> None:
    base = holes(tmp_path / "1b", "1b")
    full = ("adapter.kind=none", "parallel.strategy=fsdp")
    two = lines(tmp_path, base, gpu(24), *full, "parallel.workers.min=2")["memory"]
    one = lines(tmp_path, base, gpu(24), *full, "parallel.workers.min=1")["memory"]
    assert (two.status, one.status) == ("ok", "red")
    assert "when the run has shrunk to them" in one.found


def test_the_base_is_read_whole_by_every_rank(tmp_path: Path) -> None:
    """Eight ranks on one machine: what they hold in training is an eighth each, what they read is all of it."""
    base = holes(tmp_path / "7b", "7b")
    eight = (
        "parallel.strategy=fsdp",
        "parallel.workers.min=8",
        "parallel.workers.max=8",
        "optimizer.global_batch_size=8",
    )
    here = lines(tmp_path, base, plan.Room(100, "here"), *eight, "activation_checkpointing=true")["memory"]
    assert here.status == "red"
    assert "the base as it is read 14.96" in here.found  # 8.03 B × 2 bytes
    there = lines(tmp_path, base, gpu(80), *eight, "adapter.kind=none")["host memory"]
    assert there.found.startswith("29.9 GiB a rank of its machine's memory while the base is read, then 11.2 for")


def test_checkpoints_that_no_disk_holds_are_red(tmp_path: Path) -> None:
    base = holes(tmp_path / "70b", "70b")
    line = lines(tmp_path, base, gpu(80), "adapter.kind=none", "checkpoint.best.keep=2", "checkpoint.keep=2")[
        "checkpoint"
    ]
    # 12 × 70.55 B bytes; the newest two, the best two, the next one; and the model itself at the end.
    assert line.found.startswith("788.50 GiB each, every 20 steps; 4205.33 GiB")
    assert line.status == "red"
    elsewhere = lines(tmp_path, base, gpu(80), "checkpoint.storage=s3://bucket/runs")["checkpoint"]
    assert elsewhere.status == "ok"


@pytest.mark.parametrize("size", ["nan", "inf", "0", "-8"])
def test_a_gpu_has_a_size(size: str) -> None:
    with pytest.raises(ConfigError, match="is no size of a GPU"):
        command.run("error-triage", gpu_gib=float(size))


def test_what_another_mesh_draws_otherwise_is_said(tmp_path: Path, model: Path) -> None:
    recipe = recipes.load("error-triage", [f"model.base={model}", "adapter.dropout=0.1"])
    found = {line.name: line for line in plan.plan(recipe, Home(tmp_path / "home"), tmp_path, HERE)}
    assert found["dropout"].status == "warn"
    assert "dropout" not in lines(tmp_path, model, HERE)
