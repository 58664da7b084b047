"""Checkpoints in S3, against a real server of our own: the same rules, and one that is away."""

import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from actors.registry import gc
from actors.registry.facts import CheckpointFact, EvaluationFact, Event, RunEnded, RunFact
from actors.registry.state import State
from actors.training.checkpoint import export, manifest
from actors.training.checkpoint.storage import DAMAGED, MARKER, FolderStorage, S3Storage, open_storage
from cluster.errors import ConfigError, DependencyError
from cluster.storage import Home
from tests import s3
from tests.actors.training.saved import at, checkpoints, resumed_step, save, whole


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with s3.server("bucket") as started:
        yield started


@pytest.fixture
def storage(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3Storage:
    for name, value in s3.environment(address).items():
        monkeypatch.setenv(name, value)
    opened = open_storage(Home(tmp_path), "tiny-1", f"s3://bucket/{tmp_path.name}/")
    assert isinstance(opened, S3Storage)
    return opened


def scratch(tmp_path: Path) -> list[str]:
    folder = tmp_path / "runs" / "tiny-1"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_what_was_saved_comes_back_and_old_ones_go(storage: S3Storage, tmp_path: Path) -> None:
    told: list[str] = []
    assert resumed_step(storage) is None
    save(checkpoints(storage, keep=2, on_commit=lambda _, uri, __: told.append(uri)), 1, 2, 3)
    assert told == [f"s3://bucket/{tmp_path.name}/tiny-1/step-00000{step}" for step in (1, 2, 3)]
    assert [each.name for each in manifest.committed(storage)] == ["step-000002", "step-000003"]
    assert resumed_step(storage) == 3
    assert manifest.verify(storage, "step-000003").condition == "committed"
    assert scratch(tmp_path) == []
    adapter = export.artifact(storage, at(3), tmp_path / "run", tmp_path, write=True)
    assert sorted(path.name for path in adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_the_marker_comes_last_and_without_it_nothing_counts(storage: S3Storage) -> None:
    class Dies(S3Storage):
        def seal(self, scratch: Path, name: str, marker: str) -> None:
            assert MARKER not in self.listing()[name]
            raise KeyboardInterrupt

    save(checkpoints(storage), 1)
    mine = checkpoints(Dies(storage.uri, storage._scratch_root))
    mine.save(whole(2), at(2))
    with pytest.raises(KeyboardInterrupt):
        mine.finish()
    assert [found.condition for found in manifest.look(storage)] == ["committed", "partial"]
    assert resumed_step(storage) == 1
    assert storage.listing().keys() == {"step-000001"}  # and who goes on clears it


def test_a_damaged_one_is_passed_over(storage: S3Storage) -> None:
    save(checkpoints(storage), 1, 2)
    with storage._client() as (client, root), client.open_output_stream(f"{root}/step-000002/ledger.json") as stream:
        stream.write(b"ledger of 3")
    found = manifest.verify(storage, "step-000002")
    assert (found.condition, found.wrong) == ("damaged", ("ledger.json",))
    assert resumed_step(storage) == 1
    assert DAMAGED in storage.listing()["step-000002"]
    assert MARKER not in storage.listing()["step-000002"]
    save(checkpoints(storage), 2)
    assert resumed_step(storage) == 2


def test_an_upload_that_fails_leaves_the_last_good_one(storage: S3Storage, tmp_path: Path) -> None:
    class Away(S3Storage):
        def store(self, scratch: Path, name: str, files: Iterable[str]) -> None:
            super().store(scratch, name, list(files)[:1])
            raise DependencyError("S3 is away.")

    save(checkpoints(storage), 1)
    mine = checkpoints(Away(storage.uri, storage._scratch_root))
    mine.save(whole(2), at(2))
    settled = mine.finish()
    assert settled is not None
    assert isinstance(settled.failed, DependencyError)
    assert storage.listing().keys() == {"step-000001"}
    assert scratch(tmp_path) == []


def test_a_server_that_is_away_is_named_after_a_while(
    storage: S3Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setattr("actors.training.checkpoint.storage._PATIENCE_S", 0.0)
        with pytest.raises(DependencyError, match="cannot be reached") as caught:
            manifest.latest(S3Storage(storage.uri, tmp_path))
    assert "AWS_ENDPOINT_URL" in str(caught.value.hint)


def test_a_server_that_is_silent_is_not_waited_for_longer_than_agreed(
    storage: S3Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the connection and says nothing; the client by its own settings would wait for 12 s."""
    monkeypatch.setattr("actors.training.checkpoint.storage._PATIENCE_S", 0.0)
    monkeypatch.setattr("actors.training.checkpoint.storage._ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began_s = time.monotonic()
        with pytest.raises(DependencyError, match="cannot be reached"):
            manifest.latest(S3Storage(storage.uri, tmp_path))
    assert time.monotonic() - began_s < 10


def test_what_s3_refuses_is_said_at_once(tmp_path: Path, storage: S3Storage) -> None:
    """A bucket that is not there stays away, however often one asks: none of the half minute is waited."""
    began_s = time.monotonic()
    with pytest.raises(DependencyError, match="NO_SUCH_BUCKET") as caught:
        S3Storage("s3://nowhere/runs/tiny-1", tmp_path).require_writable()
    assert time.monotonic() - began_s < 10
    assert "bucket exists" in str(caught.value.hint)
    storage.require_writable()
    assert storage.listing() == {}


def test_who_reads_a_checkpoint_is_not_cleared_away_by_a_run_that_starts(storage: S3Storage, tmp_path: Path) -> None:
    save(checkpoints(storage), 1)
    left = tmp_path / "runs" / "tiny-1" / ".partial-step-000001-0a0b0c0d"
    left.mkdir()
    with storage.opened("step-000001") as fetch:
        folder = fetch(["ledger.json"])
        storage.clear()
        assert (folder / "ledger.json").read_text() == "ledger of 1"
        assert not left.exists()
    assert scratch(tmp_path) == []


def test_a_collection_frees_what_a_completed_run_has_saved_in_s3(storage: S3Storage, tmp_path: Path) -> None:
    home = Home(tmp_path)
    save(checkpoints(storage), 1, 2)
    (home.runs / "tiny-1").mkdir(parents=True, exist_ok=True)
    recipe = {"checkpoint": {"storage": storage.uri.removesuffix("/tiny-1")}}
    facts = (
        RunFact(id="tiny-1", name="tiny", base="b", base_digest="", recipe=recipe),
        *(
            CheckpointFact(id=f"tiny-1/step-{step}", run_id="tiny-1", step=step, path=f"{storage.uri}/step-00000{step}")
            for step in (1, 2)
        ),
        EvaluationFact(id="eval-1", run_id="tiny-1", checkpoint_id="tiny-1/step-2", passed=True),
    )
    now = datetime.now(UTC)
    entries = {fact.id: Event(seq, now, "ann", fact) for seq, fact in enumerate(facts, 1)}
    going_on = State(entries=entries)
    assert gc.look(home, going_on) == ()
    done = replace(going_on, ended={"tiny-1": RunEnded(run_id="tiny-1", status="completed")})
    assert gc.plan(done, gc.look(home, done), home, now=now).free == ()  # just saved
    drawn = gc.plan(done, gc.look(home, done), home, now=now + timedelta(days=2))
    assert [item.found.where for item in drawn.free] == [f"{storage.uri}/step-000001"]
    assert gc.collect(drawn, home, lambda: going_on).left == {
        f"{storage.uri}/step-000001": "something needs it since the plan was made"
    }
    assert len(gc.collect(drawn, home, lambda: done).freed) == 1
    assert storage.listing().keys() == {"step-000002"}
    assert gc.collect(drawn, home, lambda: done).left == {f"{storage.uri}/step-000001": "it is gone already"}


def test_other_schemes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gs://bucket"):
        open_storage(Home(tmp_path), "tiny-1", "gs://bucket/x")
    elsewhere = open_storage(Home(tmp_path), "tiny-1", str(tmp_path / "big-disk"))
    assert isinstance(elsewhere, FolderStorage)
    assert elsewhere.uri == str(tmp_path / "big-disk" / "tiny-1")
