"""`flywheel checkpoint`: what it shows of a run's storage, how it exits, what it says to those who ask wrongly."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from actors.registry.facts import CheckpointFact, EvaluationFact, RunFact
from actors.registry.ledger import Ledger
from actors.registry.store import SqlEventStore
from actors.training.checkpoint import manifest
from actors.training.checkpoint.manifest import Found
from actors.training.checkpoint.storage import RunStorage
from app.cli import checkpoint, output
from cluster import environment
from cluster.database import sqlite_uri
from cluster.errors import ConfigError, FlywheelError
from cluster.storage import Home
from tests.actors.training.saved import at, checkpoints, save, whole

RUN = "tiny-1"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with three checkpoints, of which an evaluation has measured the first and the retention keeps two."""
    home = Home(tmp_path / "home")
    home.root.mkdir()
    monkeypatch.setenv(environment.HOME, str(home.root))
    elsewhere = tmp_path / "disk"
    folder = elsewhere / RUN
    recipe = {"checkpoint": {"keep": 2, "storage": str(elsewhere)}}
    ledger = Ledger(SqlEventStore(sqlite_uri(home.registry_database)))
    ledger.commit(RunFact(id=RUN, name="tiny", base="b", base_digest="d", recipe=recipe), by="me")
    first = CheckpointFact(id=f"{RUN}/step-1", run_id=RUN, step=1, path=str(folder / "step-000001"))
    ledger.commit(first, by="me")
    ledger.commit(EvaluationFact(id="eval-1", run_id=RUN, checkpoint_id=first.id, passed=True), by="me")
    save(checkpoints(folder), 1, 2, 3)
    return folder


def called(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and the JSON that was printed; errors are raised as they are."""
    printed = io.StringIO()
    before, output.console.file = output.console.file, printed
    try:
        result = CliRunner().invoke(checkpoint.cli, [*arguments, "--json"])
    finally:
        output.console.file = before
    if isinstance(result.exception, FlywheelError):
        raise result.exception
    return result.exit_code, json.loads(printed.getvalue().splitlines()[-1])


def test_a_listing_says_what_is_there_and_what_keeps_it(run: Path) -> None:
    (run / ".partial-step-000004-0a0b0c0d").mkdir()
    (run / "step-000003" / "ledger.json").unlink()
    code, said = called("list", RUN)
    assert code == 0
    assert said["uri"] == str(run)
    shown = [
        (each["step"], each["condition"], each["kept"], each["metrics"].get("loss")) for each in said["checkpoints"]
    ]
    assert shown == [
        (1, "committed", "evaluation eval-1 measured it", 1.0),
        (2, "committed", "one of the newest 2", 0.5),
        (3, "damaged", None, None),
        (None, "partial", None, None),
    ]
    assert "ledger.json" in said["checkpoints"][2]["why"]
    assert said["checkpoints"][0]["saved_at"].startswith("20")
    assert CliRunner().invoke(checkpoint.cli, ["list", RUN]).exit_code == 0


def test_verify_names_the_file_and_fails(run: Path) -> None:
    assert called("verify", RUN)[0] == 0
    shard = run / "step-000002" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    code, said = called("verify", RUN)
    assert code == 1
    assert [each["condition"] for each in said["verified"]] == ["committed", "damaged", "committed"]
    assert said["verified"][1]["wrong"] == ["__0_0.distcp"]
    assert called("verify", f"{RUN}/step-3")[0] == 0
    assert called("verify", f"{RUN}/2")[0] == 1
    assert CliRunner().invoke(checkpoint.cli, ["verify", RUN]).exit_code == 1


def test_another_run_s_checkpoint_is_shown_as_what_it_is(run: Path) -> None:
    position = at(4, "tiny-2")
    mine = checkpoints(run)
    mine.save(whole(4), position)
    mine.finish(insist=True)
    for verb, listed in (("list", "checkpoints"), ("verify", "verified")):
        code, said = called(verb, RUN)
        assert code == (verb == "verify")
        assert (said[listed][-1]["condition"], said[listed][-1]["why"]) == (
            "damaged",
            "it is a checkpoint of run tiny-2",
        )


def test_what_its_run_removes_meanwhile_is_not_called_damaged(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify_one = manifest.verify

    def removed_then_verified(storage: RunStorage, name: str) -> Found:
        if name == "step-000001":
            storage.remove(name)
        return verify_one(storage, name)

    monkeypatch.setattr(manifest, "verify", removed_then_verified)
    code, said = called("verify", RUN)
    assert code == 0
    assert [each["name"] for each in said["verified"]] == ["step-000002", "step-000003"]
    save(checkpoints(run), 1)
    with pytest.raises(ConfigError, match="has just been removed by its run"):
        called("verify", f"{RUN}/step-1")


def test_an_export_is_the_adapter_of_the_last_or_of_one(run: Path, tmp_path: Path) -> None:
    code, said = called("export", RUN, str(tmp_path / "adapter"))
    assert code == 0
    assert (said["checkpoint"], said["what"]) == (f"{RUN}/step-3", "adapter")
    made = tmp_path / "adapter" / "adapter_model.safetensors"
    assert made.read_bytes() == (run / "step-000003" / "adapter" / "adapter_model.safetensors").read_bytes()
    assert called("export", f"{RUN}/step-1", str(tmp_path / "first"))[1]["checkpoint"] == f"{RUN}/step-1"
    with pytest.raises(ConfigError, match="exists"):
        called("export", RUN, str(tmp_path / "adapter"))
    with pytest.raises(ConfigError, match="is not in the model store"):
        called("export", RUN, str(tmp_path / "merged"), "--merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["list", "unknown-run"], "knows no run 'unknown-run'"),
        (["list", "../etc"], "cannot be a run id"),
        (["verify", f"{RUN}/step-9"], "no checkpoint of step 9"),
        (["verify", f"{RUN}/last"], "names no checkpoint"),
        (["export", f"{RUN}/step-9", "out"], "no checkpoint of step 9"),
    ],
)
def test_who_asks_wrongly_is_told(run: Path, arguments: list[str], said: str) -> None:
    with pytest.raises(FlywheelError, match=said):
        called(*arguments)
