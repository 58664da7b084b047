"""The model store on small folders that the tests write, and on the package that ships MiniLM."""

import json
import multiprocessing
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cluster import model_sources
from cluster.errors import ConfigError, DependencyError
from cluster.models import StoredModel, installed, obtain, served_name
from cluster.storage import Home, digest_folder


@pytest.fixture
def empty_home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def write_model(folder: Path, *, seed: int = 0, architecture: str = "LlamaForCausalLM") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    weights = torch.arange(4, dtype=torch.float32) + seed
    save_file({"w": weights}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


def test_a_folder_stays_where_it_is_and_is_known_by_its_digest(tmp_path: Path, empty_home: Home) -> None:
    folder = write_model(tmp_path / "My-Model")
    model = obtain(str(folder), empty_home)
    assert (model.name, model.path, model.kind) == ("my-model", folder, "causal-lm")
    assert model.digest == digest_folder(folder)
    assert installed(empty_home) == [model]


def test_changed_weights_have_another_digest_and_the_same_tokenizer_digest(tmp_path: Path, empty_home: Home) -> None:
    before = obtain(str(write_model(tmp_path / "m")), empty_home)
    after = obtain(str(write_model(tmp_path / "m", seed=1)), empty_home)
    assert before.digest != after.digest
    assert before.tokenizer_digest == after.tokenizer_digest
    assert installed(empty_home) == [after]


def test_a_later_call_reads_no_weights(tmp_path: Path, empty_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "m")
    first = obtain(str(folder), empty_home)
    monkeypatch.setattr("cluster.models.digest_folder", lambda _: pytest.fail("the weights were read again"))
    assert obtain(str(folder), empty_home) == first


def test_pickled_weights_are_refused_by_name(tmp_path: Path, empty_home: Home) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"only pytorch_model\.bin"):
        obtain(str(folder), empty_home)


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("smollm2-135m-instuct", "Did you mean 'smollm2-135m-instruct'"),
        ("/nowhere/model", "Give the path of a Hugging Face folder"),
    ],
)
def test_a_reference_to_nothing_says_what_there_is(reference: str, told: str, empty_home: Home) -> None:
    with pytest.raises(ConfigError) as caught:
        obtain(reference, empty_home)
    assert told in str(caught.value.hint)


def test_a_model_of_another_kind_is_refused_with_its_architecture(tmp_path: Path, empty_home: Home) -> None:
    with pytest.raises(ConfigError, match="ViTForImageClassification"):
        obtain(str(write_model(tmp_path / "m", architecture="ViTForImageClassification")), empty_home)


@pytest.mark.integration  # seconds: processes, or 90 MB to hash
def test_the_hub_offline_is_a_dependency_error_and_leaves_nothing(tmp_path: Path, empty_home: Home) -> None:
    context = multiprocessing.get_context("spawn")  # the Hub's client reads HF_HUB_OFFLINE when it is imported
    with context.Pool(1, initializer=_offline) as pool:
        caught = pool.apply(_failure, ("owner/Some-Model", empty_home))
    assert isinstance(caught, DependencyError)
    assert "owner/Some-Model" in caught.message
    assert "HF_HUB_OFFLINE" in str(caught.hint)
    assert installed(empty_home) == []
    assert not [path for path in empty_home.models.iterdir() if path.is_dir()]


def _offline() -> None:
    import os

    os.environ["HF_HUB_OFFLINE"] = "1"


def _failure(reference: str, home: Home) -> Exception | None:
    try:
        obtain(reference, home)
    except DependencyError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("reference", "name"),
    [("HuggingFaceTB/SmolLM2-135M", "smollm2-135m"), ("smollm2-135m-instruct", "smollm2-135m-instruct")],
)
def test_clients_ask_for_the_last_part_in_lower_case(reference: str, name: str) -> None:
    assert served_name(reference) == name


def test_a_name_that_could_be_taken_for_an_adapter_is_refused() -> None:
    with pytest.raises(ConfigError, match="base:adapter"):
        served_name("owner/base:adapter")


def test_a_package_that_is_not_installed_is_named(empty_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_sources.CATALOG, "absent", model_sources.ZipPackage("no-such-distribution"))
    with pytest.raises(DependencyError, match="no-such-distribution"):
        obtain("absent", empty_home)


@pytest.mark.integration  # seconds: processes, or 90 MB to hash
def test_two_processes_that_ask_at_once_get_the_same_model(empty_home: Home) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        first, second = pool.starmap(obtain, [("all-minilm-l6-v2", empty_home)] * 2)
    assert first == second
    assert first.kind == "sentence-embedder"
    assert first.digest == digest_folder(first.path)
    assert not list(empty_home.models.glob(".partial-*"))


@pytest.mark.integration  # seconds: processes, or 90 MB to hash
def test_a_moved_home_keeps_its_models_and_a_damaged_one_is_told(tmp_path: Path, empty_home: Home) -> None:
    stored = obtain("all-minilm-l6-v2", empty_home)
    shutil.move(empty_home.root, tmp_path / "elsewhere")
    moved = obtain("all-minilm-l6-v2", Home(tmp_path / "elsewhere"))
    assert _facts(moved) == _facts(stored)
    (moved.path / "config.json").write_text("{}")
    with pytest.raises(DependencyError, match="not those that were stored"):
        obtain("all-minilm-l6-v2", Home(tmp_path / "elsewhere"))


def _facts(model: StoredModel) -> tuple[str, ...]:
    return (model.name, model.digest, model.kind, model.source, model.tokenizer_digest)
