import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from actors.registry import upload
from actors.registry.card import CARD_FILE, describe, encode, read
from actors.registry.upload import Staged, stage
from cluster import signing
from cluster.errors import CapacityError, ConfigError, DependencyError
from cluster.progress import Progress, silent
from cluster.storage import Home, digest_folder
from tests.actors.registry.crashes import every_crash

PART = 4096


def make_source(folder: Path, *, parts: int = 3) -> Path:
    """A full model in three files, of which one has several parts; the same bytes whenever it is made."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"word_embedding_dimension": 8}')
    numbers = np.arange(parts * PART // 4, dtype=np.int32)
    save_file({"w": numbers}, folder / "model.safetensors")
    return folder


def staged(source: Path, home: Home, sink: Callable[[Progress], None] = silent) -> Staged:
    return stage(source, describe(source, kind="model", base="b"), home, "triage", sink)


def visible(home: Home) -> list[str]:
    return sorted(path.name for path in (home.versions / "triage").iterdir() if path.name != ".lock")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PART_BYTES", PART)
    monkeypatch.setattr(upload, "_STEP_BYTES", 1500)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def test_a_copy_lies_signed_under_its_digest_and_outlives_the_source(tmp_path: Path, home: Home) -> None:
    source = make_source(tmp_path / "source")
    digest = digest_folder(source)
    found = staged(source, home)
    shutil.rmtree(source)
    artifact = found.artifact
    assert found.folder == home.versions / artifact.path
    assert artifact.path == Path("triage") / artifact.digest[:12]
    assert digest_folder(found.folder) == artifact.digest != digest
    assert signing.verify(found.folder, home, what="model triage/1", digest=artifact.digest) == artifact.signed_by
    assert visible(home) == [artifact.digest[:12], f"{artifact.digest[:12]}.sig"]
    assert artifact.size_bytes == sum(path.stat().st_size for path in found.folder.rglob("*") if path.is_file())
    assert read(found.folder) == found.card
    (found.folder / CARD_FILE).unlink()
    assert digest_folder(found.folder) == digest


def test_the_same_content_is_stored_once_and_told_by_its_bytes(tmp_path: Path, home: Home) -> None:
    first = staged(make_source(tmp_path / "a"), home)
    inode = (first.folder / "model.safetensors").stat().st_ino
    assert staged(make_source(tmp_path / "b"), home) == first
    assert (first.folder / "model.safetensors").stat().st_ino == inode
    other = make_source(tmp_path / "c")
    save_file({"w": np.ones(3 * PART // 4, dtype=np.int32)}, other / "model.safetensors")  # of the same size
    assert staged(other, home).artifact.digest != first.artifact.digest
    assert len(visible(home)) == 4


def test_another_card_is_another_version(tmp_path: Path, home: Home) -> None:
    source = make_source(tmp_path / "a")
    first = stage(source, describe(source, kind="model", base="b"), home, "triage")
    second = stage(source, describe(source, kind="model", base="b", recipe_digest="r"), home, "triage")
    assert first.artifact.digest != second.artifact.digest


def test_a_stored_version_that_somebody_changed_is_noticed(tmp_path: Path, home: Home) -> None:
    first = staged(make_source(tmp_path / "a"), home)
    (first.folder / "README.md").write_text("improved")
    with pytest.raises(DependencyError, match="somebody changed it"):
        staged(make_source(tmp_path / "b"), home)
    signing.signature_path(first.folder).unlink()
    with pytest.raises(DependencyError, match="somebody changed it"):
        staged(make_source(tmp_path / "c"), home)


def test_a_version_without_its_signature_is_signed_again(tmp_path: Path, home: Home) -> None:
    first = staged(make_source(tmp_path / "a"), home)
    signing.signature_path(first.folder).unlink()
    assert staged(make_source(tmp_path / "b"), home) == first
    signing.verify(first.folder, home, what="model triage/1")


def test_a_folder_that_changes_meanwhile_is_refused_and_leaves_nothing(tmp_path: Path, home: Home) -> None:
    source = make_source(tmp_path / "a")
    card = describe(source, kind="model", base="b")

    def change(_: Progress) -> None:
        (source / "config.json").write_text('{"a": 1}')

    with pytest.raises(ConfigError, match="changed while"):
        stage(source, card, home, "triage", change)
    assert visible(home) == []
    shutil.rmtree(source)
    make_source(source, parts=1)
    save_file({"w": np.ones(4, np.float16)}, source / "model.safetensors")
    with pytest.raises(ConfigError, match="changed while"):
        stage(source, card, home, "triage")  # not what the card was made from any more


def test_progress_counts_every_byte(tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_REPORT_EVERY_S", 0.0)
    source = make_source(tmp_path / "a")
    reports: list[Progress] = []
    staged(source, home, reports.append)
    total = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    assert (reports[-1].done, reports[-1].total, reports[-1].unit) == (total, total, "bytes")
    assert [report.done for report in reports] == sorted(report.done for report in reports)
    assert reports[-1].rate is not None
    assert reports[-1].rate > 0


class Stopped(Exception):
    """What interrupts an upload in a test."""


def interrupted(source: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an upload that stopped after the second part of the weights."""
    with monkeypatch.context() as patched:
        whole = upload._move

        def stop(source: int, target: int, at: int, count: int) -> int:
            if at >= 2 * PART:
                raise Stopped
            return whole(source, target, at, count)

        patched.setattr(upload, "_move", stop)
        with pytest.raises(Stopped):
            staged(source, home)
    (left,) = (home.versions / "triage").glob(".partial-upload-*")
    return left


def test_a_killed_upload_goes_on_at_the_last_whole_part(
    tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source(tmp_path / "a")
    interrupted(source, home, monkeypatch)
    moved: list[tuple[int, int]] = []
    whole = upload._move

    def count(source: int, target: int, at: int, count: int) -> int:
        moved.append((at, count))
        return whole(source, target, at, count)

    monkeypatch.setattr(upload, "_move", count)
    found = staged(source, home)
    assert min(at for at, _ in moved) == 2 * PART
    assert found == staged(make_source(tmp_path / "b"), Home(tmp_path / "other")).__class__(
        found.artifact, found.card, found.folder
    )
    assert digest_folder(found.folder) == found.artifact.digest
    assert visible(home) == [found.artifact.digest[:12], f"{found.artifact.digest[:12]}.sig"]


def test_a_half_copy_that_somebody_touched_is_made_anew(
    tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source(tmp_path / "a")
    left = interrupted(source, home, monkeypatch)
    with (left / "files" / "model.safetensors").open("r+b") as file:
        file.seek(100)
        file.write(b"evil")
    found = staged(source, home)
    (found.folder / CARD_FILE).unlink()
    assert digest_folder(found.folder) == digest_folder(source)


def test_a_changed_source_does_not_go_on_where_another_one_stopped(
    tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source(tmp_path / "a")
    interrupted(source, home, monkeypatch)
    save_file({"w": np.ones(3 * PART // 4, dtype=np.int32)}, source / "model.safetensors")
    found = staged(source, home)
    assert (found.folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_two_at_once_make_one(tmp_path: Path, home: Home) -> None:
    source = make_source(tmp_path / "a")
    found: list[Staged] = []
    threads = [threading.Thread(target=lambda: found.append(staged(source, home))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({one.artifact.digest for one in found}) == 1
    assert len(visible(home)) == 2


def test_a_full_disk_leaves_an_upload_that_goes_on(tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source(tmp_path / "a")
    with monkeypatch.context() as patched:

        def full(source: int, target: int, at: int, count: int) -> int:
            if at >= PART:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return os.copy_file_range(source, target, count, at, at)

        patched.setattr(upload, "_move", full)
        with pytest.raises(CapacityError, match="no room") as refused:
            staged(source, home)
        assert "flywheel models gc" in (refused.value.hint or "")
    assert [name for name in visible(home) if not name.startswith(".partial-upload-")] == []
    reports: list[Progress] = []
    found = staged(source, home, reports.append)
    assert "went on" in reports[-1].note
    assert digest_folder(found.folder) == found.artifact.digest


def test_a_disk_that_cannot_hold_it_is_not_filled(tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(CapacityError, match="0 MiB are free"):
        staged(make_source(tmp_path / "a"), home)


def test_a_file_system_without_copies_in_the_kernel_will_do(
    tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> int:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    found = staged(make_source(tmp_path / "a"), home)
    assert digest_folder(found.folder) == found.artifact.digest


def die(place: Path) -> None:
    """What is killed: staging, with parts as small as the fixture makes them."""
    upload.PART_BYTES, upload._STEP_BYTES = PART, 1500  # type: ignore[misc]
    staged(place.parents[1] / "source", Home(place / "home"))


@pytest.mark.integration
def test_kill_at_any_point_leaves_no_version_or_a_whole_signed_one(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    shared = Home(tmp_path / "shared")
    expected = staged(source, shared).artifact
    places = every_crash(__file__, "die", tmp_path / "deaths")
    assert len(places) > 30
    for place in places:
        home = Home(place / "home")
        store = home.versions / "triage"
        for folder in store.iterdir() if store.is_dir() else ():
            if not folder.name.startswith(".") and folder.is_dir():
                assert folder.name == expected.digest[:12]
                signing.verify(folder, home, what="model triage/1", digest=expected.digest)
        again = staged(source, home)
        assert again.artifact.digest == expected.digest
        signing.verify(again.folder, home, what="model triage/1", digest=expected.digest)
        assert visible(home) == [expected.digest[:12], f"{expected.digest[:12]}.sig"]


def test_the_card_is_canonical_in_the_store(tmp_path: Path, home: Home) -> None:
    found = staged(make_source(tmp_path / "a"), home)
    assert (found.folder / CARD_FILE).read_bytes() == encode(found.card)
    assert json.loads((found.folder / CARD_FILE).read_text())["kind"] == "model"
