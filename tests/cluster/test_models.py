"""The model store on small folders that the tests write, and on the package that ships MiniLM."""

import json
import multiprocessing
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cluster import model_sources, models
from cluster.errors import ConfigError, DependencyError
from cluster.models import StoredModel, installed, obtain, require_signed, served_name, signature_of
from cluster.signing import Keyring, SignatureError, Verifier, sign, signature_path
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
    monkeypatch.setattr("cluster.models.file_digests", lambda _: pytest.fail("the weights were read again"))
    assert obtain(str(folder), empty_home) == first


@dataclass(frozen=True)
class Folder:
    """A source of the catalog that writes a small model at once."""

    seed: int = 0

    def describe(self) -> str:
        return "a test"

    def write(self, folder: Path) -> None:
        write_model(folder, seed=self.seed)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    """A model of the catalog."""
    monkeypatch.setitem(model_sources.CATALOG, "tiny", Folder())
    return "tiny"


def refusal(model: StoredModel, home: Home) -> str:
    with pytest.raises(SignatureError, match=f"^Base {model.name} cannot be loaded: ") as caught:
        require_signed(model, home, Verifier())
    return caught.value.reason


def test_what_is_put_into_the_store_is_signed(tmp_path: Path, empty_home: Home, tiny: str) -> None:
    stored, theirs = obtain(tiny, empty_home), obtain(str(write_model(tmp_path / "theirs", seed=1)), empty_home)
    for model in (stored, theirs):
        require_signed(model, empty_home, Verifier())
    assert signature_of(stored.path, empty_home) == empty_home.models / "tiny.sig"
    assert signature_of(theirs.path, empty_home).parent == empty_home.models
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "theirs"], "nothing beside a user's folder"
    assert obtain(tiny, empty_home) == stored


@pytest.mark.parametrize("where", ["store", "in place"])
def test_what_has_changed_since_is_not_loaded(tmp_path: Path, empty_home: Home, tiny: str, where: str) -> None:
    model = obtain(tiny if where == "store" else str(write_model(tmp_path / "theirs")), empty_home)
    before = (model.path / "tokenizer.json").stat()
    (model.path / "tokenizer.json").write_text('{"version": "1.1"}')
    os.utime(model.path / "tokenizer.json", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert obtain(tiny if where == "store" else str(model.path), empty_home) == model, "its fingerprint is the same"
    assert refusal(model, empty_home) == "changed"


def test_a_model_signed_by_a_stranger_is_not_loaded(empty_home: Home, tmp_path: Path, tiny: str) -> None:
    model = obtain(tiny, empty_home)
    sign(model.path, Home(tmp_path / "theirs"), signature=signature_path(model.path))
    assert obtain(tiny, empty_home) == model
    assert refusal(model, empty_home) == "unknown_key"


def test_another_signed_model_in_its_place_is_not_loaded(empty_home: Home, tiny: str) -> None:
    model = obtain(tiny, empty_home)
    write_model(model.path, seed=1)
    sign(model.path, empty_home)
    assert refusal(model, empty_home) == "changed"


def test_a_store_from_before_models_were_signed_goes_on(empty_home: Home, tiny: str) -> None:
    model = obtain(tiny, empty_home)
    signature_path(model.path).unlink()
    assert refusal(model, empty_home) == "unsigned"
    assert obtain(tiny, empty_home) == model
    require_signed(model, empty_home, Verifier())
    signature_path(model.path).unlink()
    (model.path / "tokenizer.json").write_text('{"version": "2"}')
    with pytest.raises(DependencyError, match="not those that were stored"):
        obtain(tiny, empty_home)
    assert not signature_path(model.path).exists()


def test_a_folder_that_appeared_in_the_store_by_itself_is_not_signed(empty_home: Home, tiny: str) -> None:
    write_model(empty_home.models / tiny)
    with pytest.raises(SignatureError) as caught:
        obtain(tiny, empty_home)
    assert caught.value.reason == "unsigned"
    assert not (empty_home.models / "tiny.sig").exists()


def test_who_died_before_the_manifest_was_written_loses_nothing(empty_home: Home, tiny: str) -> None:
    model = obtain(tiny, empty_home)
    (empty_home.models / "tiny.json").unlink()
    assert obtain(tiny, empty_home) == model
    (empty_home.models / "tiny.json").unlink()
    (model.path / "config.json").write_text('{"architectures": ["EvilForCausalLM"]}')
    with pytest.raises(SignatureError):
        obtain(tiny, empty_home)


def test_a_folder_that_comes_with_a_signature_is_believed_for_that_only(tmp_path: Path, empty_home: Home) -> None:
    folder = write_model(tmp_path / "theirs")
    key = sign(folder, Home(tmp_path / "publisher"))
    model = obtain(str(folder), empty_home)
    assert refusal(model, empty_home) == "unknown_key"
    assert Keyring(empty_home).trust(tmp_path / "publisher" / "keys" / "trusted" / f"{key}.pem") == key
    require_signed(model, empty_home, Verifier())


def test_a_version_is_not_signed_anew_by_naming_its_folder(empty_home: Home) -> None:
    folder = write_model(empty_home.versions / "triage" / "0123456789ab")
    model = obtain(str(folder), empty_home)
    assert refusal(model, empty_home) == "unsigned"
    assert not list(empty_home.models.glob("*.sig"))


def test_another_signed_version_in_its_place_is_not_loaded(empty_home: Home) -> None:
    """Its folder says what was registered, and `obtain` believes what it finds there."""
    scratch = write_model(empty_home.versions / "triage" / "0123456789ab")
    folder = scratch.rename(scratch.with_name(digest_folder(scratch)[:12]))
    sign(folder, empty_home)
    require_signed(obtain(str(folder), empty_home), empty_home, Verifier())
    write_model(folder, seed=1)
    sign(folder, empty_home)
    assert refusal(obtain(str(folder), empty_home), empty_home) == "changed"


def test_a_folder_with_links_is_refused(tmp_path: Path, empty_home: Home) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "vocab.json").symlink_to(folder / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"vocab\.json in .* is a symbolic link"):
        obtain(str(folder), empty_home)


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


@pytest.mark.parametrize(
    ("layer", "folder", "activation"),
    [
        ("joblib.numpy_pickle", "notes.txt", None),
        ("sentence_transformers.base.model.torch", "", None),
        ("sentence_transformers.models.WordEmbeddings", "", None),
        ("sentence_transformers.models.Pooling", "../elsewhere", None),
        ("sentence_transformers.models.Dense", "2_Dense", "os.system"),
    ],
)
def test_a_layer_that_would_import_something_else_is_refused(
    tmp_path: Path, layer: str, folder: str, activation: str | None
) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": folder, "type": layer}]))
    if activation:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps({"activation_function": activation}))
    with pytest.raises(ConfigError, match=r"only sentence-transformers' own layers|none of torch's"):
        models.require_known_modules(tmp_path)


def test_the_layers_that_embedders_are_made_of_are_known(tmp_path: Path) -> None:
    made = [
        ("sentence_transformers.models.Transformer", ""),
        ("sentence_transformers.base.modules.transformer.Transformer", ""),
        ("sentence_transformers.sentence_transformer.modules.pooling.Pooling", "1_Pooling"),
        ("sentence_transformers.models.Dense", "2_Dense"),
    ]
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense" / "config.json").write_text('{"activation_function": "torch.nn.modules.activation.Tanh"}')
    (tmp_path / "modules.json").write_text(json.dumps([{"type": layer, "path": folder} for layer, folder in made]))
    models.require_known_modules(tmp_path)
