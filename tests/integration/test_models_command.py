"""The life of a version from the command line: refused, forced, split, rolled back, pinned, moved elsewhere."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.registry.client import RegistryClient
from actors.registry.facts import DataFact, RunFact, VersionFact
from app.cli import models_change as change
from app.cli import output
from cluster import environment
from cluster.errors import DependencyError, StateError
from cluster.session import Session
from cluster.signing import signature_path
from cluster.storage import Home
from tests.integration.test_registry_actor import ROOT, adapter

pytestmark = pytest.mark.integration

NAME = "commanded"
Call = Callable[..., dict[str, Any]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, registry: RegistryClient) -> Call:
    """A command, in this process and on its Ray; what it prints as JSON."""

    def run(command: Callable[..., None], *arguments: object, **options: object) -> dict[str, Any]:
        printed = io.StringIO()
        monkeypatch.setattr(output.console, "file", printed)
        try:
            command(*arguments, **options, as_json=True)
        finally:
            answer = printed.getvalue()
        return json.loads(answer)  # type: ignore[no-any-return]

    return run


@pytest.fixture(scope="module")
def versions(registry: RegistryClient, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("commanded")
    registry.data(DataFact(id="commanded@1", name="commanded", digest="d", stage="tokens"))
    registry.begin_run(RunFact(id="commanded-1", name=NAME, base="b", base_digest="", data_version="commanded@1"))
    for seed in (1, 2, 3):
        source = adapter(root / str(seed), seed=100 + seed)
        registry.register(
            VersionFact(name=NAME, kind="adapter", source_path=source, base="b", data_version="commanded@1")
        )


def promote(to: str, **options: object) -> dict[str, object]:
    return {
        "name": NAME,
        "to": to,
        "reason": "because",
        "alias": "champion",
        "expected": None,
        "force": False,
    } | options


def test_a_version_goes_through_its_life(call: Call, versions: None, registry: RegistryClient, home: Home) -> None:
    with pytest.raises(StateError, match="is candidate; it cannot be promoted"):
        call(change.promote, **promote("1"))
    assert call(change.promote, **promote("1", force=True, expected="0"))["forced"] is True
    with pytest.raises(StateError, match="stands at version 1, not at version 2"):
        call(change.promote, **promote("2", force=True, expected="2"))
    assert call(change.promote, **promote("1=90%,2=10%", force=True, expected="1"))["split"] == {"1": 0.9, "2": 0.1}
    assert call(change.rollback, NAME, "worse", alias="champion")["split"] == {"1": 1.0}

    with pytest.raises(StateError, match="has the alias champion"):
        call(change.retire, f"{NAME}/1", "old")
    call(change.retire, f"{NAME}/2", "old")
    call(change.pin, f"{NAME}/3", "for the auditor")

    found = call(change.gc, dry_run=True, older_than="0s")
    free = {each["what"] for each in found["freed"]}
    assert f"version {NAME}/2" in free
    assert not free & {f"version {NAME}/1", f"version {NAME}/3"}
    assert "pinned" in found["kept"][f"{NAME}/3"]
    assert (home.versions / registry.show(f"{NAME}/2").version.path).is_dir()

    assert [each["version_id"] for each in call(change.verify, f"{NAME}@champion")["verified"]] == [f"{NAME}/1"]
    victim = home.versions / registry.show(f"{NAME}/3").version.path / "adapter_model.safetensors"
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    with pytest.raises(DependencyError, match=f"{NAME}/3"):
        call(change.verify, f"{NAME}/3")
    content[-1] ^= 1
    victim.write_bytes(content)
    signature = signature_path(victim.parent)
    signature.unlink()
    with pytest.raises(DependencyError, match=f"{NAME}/3"):
        call(change.verify, f"{NAME}/3")
    call(change.sign, f"{NAME}/3")
    call(change.verify, f"{NAME}/3")


def test_a_version_moves_to_another_installation_that_trusts_its_key(
    call: Call, versions: None, registry: RegistryClient, home: Home, ray_session: Session, tmp_path: Path
) -> None:
    there = Home(tmp_path / "there")
    file = tmp_path / "commanded.tar"
    exported = call(change.export, f"{NAME}/1", out=file)

    def flywheel(*arguments: str) -> subprocess.CompletedProcess[str]:
        settings = {**os.environ, environment.HOME: str(there.root)}
        settings.pop(environment.RAY_ADDRESS, None)
        command = [sys.executable, "-m", "app", *arguments, "--json"]
        return subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=120)

    stranger = flywheel("models", "import", str(file))
    assert stranger.returncode == 1
    assert exported["signed_by"] in json.loads(stranger.stdout)["error"]["message"]
    assert not list(there.versions.glob("*/[!.]*"))
    key = next((home.root / "keys" / "trusted").glob(f"{exported['signed_by']}.pem"))
    assert flywheel("signers", "trust", str(key)).returncode == 0

    came = flywheel("models", "import", str(file))
    assert came.returncode == 0, came.stderr
    version = json.loads(came.stdout)
    ours = registry.show(f"{NAME}/1").version
    assert (version["digest"], version["origin"]["version_id"]) == (ours.digest, ours.id)
    shown = json.loads(flywheel("models", "show", NAME, "--lineage").stdout)
    assert [node["id"] for node in shown["nodes"]] == ["commanded@1", f"{NAME}/1"]
    verified = json.loads(flywheel("models", "verify").stdout)["verified"]
    assert [(each["version_id"], each["key_id"]) for each in verified] == [(f"{NAME}/1", exported["signed_by"])]
