"""`flywheel signers`: installations tell each other whom to believe, and a mistake gives nothing away."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app.cli import output, signers
from cluster.errors import ConfigError, FlywheelError
from cluster.signing import Keyring, SignatureError, sign, signature_path, verify
from cluster.storage import Home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def theirs(tmp_path: Path) -> Home:
    return Home(tmp_path / "theirs")


class Command:
    """Runs `flywheel signers …` in one home and returns what it shows."""

    def __init__(self, patch: pytest.MonkeyPatch, scratch: Path) -> None:
        self._patch = patch
        self._scratch = scratch

    def __call__(self, home: Home, *arguments: str) -> str:
        self._patch.setenv("FLYWHEEL_HOME", str(home.root))
        with self._patch.context() as patched, self._scratch.open("w+") as file:
            patched.setattr(output.console, "file", file)
            result = CliRunner().invoke(signers.cli, list(arguments))
            if isinstance(result.exception, FlywheelError):
                raise result.exception
            assert result.exit_code == 0, result.output
            file.seek(0)
            return file.read()

    def json(self, home: Home, *arguments: str) -> Any:
        return json.loads(self(home, *arguments, "--json"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    return Command(monkeypatch, tmp_path / "shown")


def test_a_key_is_made_once_and_listed_as_ours(home: Home, run: Command) -> None:
    assert "No key is trusted yet" in run(home, "list")
    made = run.json(home, "init")
    assert made == {"id": made["id"], "made": True, "private_path": str(home.keys / "signing.pem")}
    assert run.json(home, "init") == {**made, "made": False}
    assert run(home, "init").startswith(f"There is signing key {made['id']}")
    listed = run.json(home, "list")
    assert listed["signing"] == made["id"]
    assert [(key["id"], key["curve"], key["signs"]) for key in listed["keys"]] == [(made["id"], "secp256r1", True)]
    assert "signs here" in run(home, "list")


def test_what_one_installation_signs_another_loads_once_it_trusts_it(
    home: Home, theirs: Home, tmp_path: Path, run: Command
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    key = sign(folder, theirs)
    run(theirs, "export", "--out", str(tmp_path / "their.pem"))
    assert run(theirs, "export") == (tmp_path / "their.pem").read_text()
    assert run.json(theirs, "export") == {"id": key, "pem": (tmp_path / "their.pem").read_text(), "path": None}

    assert run.json(home, "trust", str(tmp_path / "their.pem")) == {"id": key, "new": True}
    assert "was trusted already" in run(home, "trust", str(tmp_path / "their.pem"))
    assert verify(folder, home, what="base tiny") == key
    assert [entry["signs"] for entry in run.json(home, "list")["keys"]] == [False]
    assert run.json(home, "distrust", key) == {"id": key, "refused": []}
    with pytest.raises(SignatureError):
        verify(folder, home, what="base tiny")


def test_a_private_key_given_by_mistake_is_not_copied(home: Home, theirs: Home, run: Command) -> None:
    Keyring(theirs).ensure()
    with pytest.raises(ConfigError, match=r"private key\. It has not been copied"):
        run(home, "trust", str(Keyring(theirs).private_path))
    assert run.json(home, "list")["keys"] == []


def test_the_private_half_is_never_exported_nor_overwritten(home: Home, run: Command) -> None:
    run(home, "init")
    private = (home.keys / "signing.pem").read_text()
    assert "PRIVATE" not in run(home, "export")
    with pytest.raises(ConfigError, match="exists"):
        run(home, "export", "--out", str(home.keys / "signing.pem"))
    assert (home.keys / "signing.pem").read_text() == private


def test_our_own_key_goes_only_by_force_and_what_that_breaks_is_told(home: Home, run: Command) -> None:
    folder = home.versions / "triage" / "0123456789ab"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    key = sign(folder, home)
    with pytest.raises(ConfigError, match=f"{key} is the key .* 1 versions and 0 base models") as caught:
        run(home, "distrust", key)
    assert "--force" in str(caught.value.hint)
    assert run.json(home, "distrust", key, "--force") == {"id": key, "refused": [str(signature_path(folder))]}
    assert run.json(home, "init")["id"] != key


def test_a_key_that_is_not_there_is_told_with_those_that_are(home: Home, run: Command) -> None:
    key = run.json(home, "init")["id"]
    with pytest.raises(ConfigError) as caught:
        run(home, "distrust", "0123456789abcdef")
    assert key in str(caught.value.hint)
