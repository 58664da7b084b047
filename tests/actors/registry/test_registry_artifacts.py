import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from actors.registry.artifacts import admit
from actors.registry.state import VersionFact
from cluster.errors import ConfigError, DependencyError
from cluster.storage import Home, digest_folder


def fact(source: Path, kind: str = "adapter", name: str = "triage") -> VersionFact:
    return VersionFact(name=name, kind=kind, source_path=source, base="smollm2-135m-instruct")  # type: ignore[arg-type]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def test_a_copy_lies_under_its_digest_and_outlives_the_source(make_adapter: Callable[..., Path], home: Home) -> None:
    source = make_adapter()
    digest = digest_folder(source)
    artifact = admit(fact(source), home)
    (source / "adapter_config.json").unlink()
    assert artifact.path == home.versions / "triage" / digest[:12]
    assert digest_folder(artifact.path) == artifact.digest == digest
    assert artifact.adapter is not None
    assert (artifact.adapter.rank, artifact.adapter.alpha) == (4, 8)
    assert artifact.adapter.target_modules == ("q_proj", "v_proj")


def test_the_same_content_is_stored_once_even_if_an_earlier_registration_died(
    make_adapter: Callable[..., Path], home: Home
) -> None:
    first = admit(fact(make_adapter("a")), home)
    second = admit(fact(make_adapter("b")), home)
    assert first == second
    assert [path.name for path in (home.versions / "triage").iterdir()] == [first.digest[:12]]


def test_a_stored_version_that_somebody_changed_is_noticed(make_adapter: Callable[..., Path], home: Home) -> None:
    artifact = admit(fact(make_adapter("a")), home)
    (artifact.path / "README.md").write_text("improved")
    with pytest.raises(DependencyError, match="somebody changed it"):
        admit(fact(make_adapter("b")), home)


@pytest.mark.parametrize(
    "name", ["optimizer.pt", "training_args.bin", "state.pkl", "modeling.py", ".hidden", "a/b.pth"]
)
def test_what_may_run_code_is_refused_by_name(make_adapter: Callable[..., Path], home: Home, name: str) -> None:
    source = make_adapter()
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).write_bytes(b"x")
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        admit(fact(source), home)
    assert not home.versions.exists()


def test_links_are_refused(make_adapter: Callable[..., Path], home: Home) -> None:
    source = make_adapter()
    (source / "secrets.json").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="symbolic link"):
        admit(fact(source), home)


def test_weights_must_be_what_the_configuration_says(make_adapter: Callable[..., Path], home: Home) -> None:
    with pytest.raises(ConfigError, match=r"has rank 8, but adapter_config\.json says 4"):
        admit(fact(make_adapter(rank=8, recorded_rank=4)), home)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"base_model_name_or_path": None}, "which base"),
        ({"r": 0}, "not a LoRA"),
        ({"target_modules": None}, "not a LoRA"),
    ],
)
def test_an_adapter_that_an_engine_could_not_load_is_refused(
    make_adapter: Callable[..., Path], home: Home, changes: dict[str, object], complaint: str
) -> None:
    source = make_adapter()
    path = source / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=complaint):
        admit(fact(source), home)


def test_a_pickle_that_calls_itself_safetensors_is_refused(make_adapter: Callable[..., Path], home: Home) -> None:
    source = make_adapter()
    (source / "adapter_model.safetensors").write_bytes(b"\x80\x04\x95 not a header at all")
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        admit(fact(source), home)


def test_a_full_model_needs_its_configuration_and_weights(tmp_path: Path, home: Home) -> None:
    source = tmp_path / "model"
    source.mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        admit(fact(source, "model"), home)
    (source / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="safetensors"):
        admit(fact(source, "model"), home)
    save_file({"w": np.ones((2, 2), dtype=np.float32)}, source / "model.safetensors")
    artifact = admit(fact(source, "model"), home)
    assert artifact.adapter is None
    assert (artifact.path / "model.safetensors").is_file()


def test_a_missing_folder_and_an_impossible_name_are_user_errors(tmp_path: Path, home: Home) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        admit(fact(tmp_path / "nowhere"), home)
    with pytest.raises(ConfigError, match="name"):
        admit(fact(tmp_path, name="../up"), home)
