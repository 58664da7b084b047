"""One process saves and goes on: what is committed, what is passed over, what a broken disk costs, what may go."""

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from actors.training.checkpoint import manifest
from actors.training.checkpoint.storage import FolderStorage
from actors.training.job import Position
from cluster.errors import CapacityError, DependencyError, TrainingError
from cluster.storage import digest_file
from tests.actors.training.saved import (
    NAMES,
    RUN,
    assert_equal,
    at,
    blank,
    checkpoints,
    largest_file,
    resumed_step,
    save,
    whole,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    assert resumed_step(tmp_path) is None
    save(checkpoints(tmp_path), 1, 2)
    assert resumed_step(tmp_path) == 2
    found = manifest.latest(FolderStorage(tmp_path))
    assert found is not None
    assert found.position == at(2)
    assert found.metrics == {"loss": 0.5}
    assert found.size_bytes == sum(
        path.stat().st_size for path in (tmp_path / found.name).rglob("*") if path.is_file()
    ) - sum((tmp_path / found.name / name).stat().st_size for name in ("manifest.json", "COMMITTED"))


def test_each_checkpoint_holds_an_adapter_folder_and_no_other_pickle_than_torch_s(tmp_path: Path) -> None:
    save(checkpoints(tmp_path), 1)
    folder = tmp_path / "step-000001"
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert adapter.keys() == set(NAMES)
    assert all(adapter[name].equal(whole(1)[f"weights/{name}"]) for name in NAMES)
    assert (folder / "adapter" / "adapter_config.json").read_text() == '{"peft_type": "LORA"}\n'
    shards = [".metadata", "COMMITTED", "__0_0.distcp"]
    assert names(folder) == [*shards, "adapter", "ledger.json", "manifest.json", "model.json", "position.json"]


def test_a_save_returns_when_the_state_is_copied(tmp_path: Path) -> None:
    """The state may change at once; what is written is what it was."""

    class Slow(FolderStorage):
        go_on = threading.Event()

        def free_bytes(self) -> int | None:
            assert self.go_on.wait(60)
            return super().free_bytes()

    mine = checkpoints(Slow(tmp_path))
    state = whole(1)
    assert mine.save(state, at(1), ledger="ledger of 1") is None
    for tensor in state.values():
        tensor.zero_()
    assert names(tmp_path) == []
    Slow.go_on.set()
    settled = mine.finish()
    assert settled is not None
    assert settled.failed is None
    assert settled.uri == str(tmp_path / "step-000001")
    assert resumed_step(tmp_path) == 1
    noted = mine.take_metrics()
    assert noted["checkpoint_failed"] == 0
    assert 0 <= noted["checkpoint_wait_s"] <= noted["checkpoint_stall_s"] < noted["checkpoint_commit_s"]
    assert mine.take_metrics() == {}


def test_buffers_are_made_once(tmp_path: Path) -> None:
    mine = checkpoints(tmp_path)
    assert mine.resume(whole(0)) is None
    mine.save(whole(1), at(1))
    first = {name: buffer.data_ptr() for name, buffer in mine._staging.buffers.items()}
    mine.save(whole(2), at(2))
    assert {name: buffer.data_ptr() for name, buffer in mine._staging.buffers.items()} == first
    mine.finish(insist=True)


STAND_INS: Mapping[str, Callable[[Path], None]] = {
    "loop": lambda path: path.symlink_to(path.name),
    "pipe": os.mkfifo,  # which would be waited on for ever
    "folder": Path.mkdir,
}


@pytest.mark.parametrize(
    ("file", "damage", "condition"),
    [
        ("COMMITTED", "gone", "partial"),
        ("manifest.json", "gone", "damaged"),
        ("manifest.json", "flipped", "damaged"),
        ("position.json", "flipped", "damaged"),
        (".metadata", "flipped", "damaged"),
        (".metadata", "gone", "damaged"),
        ("__0_0.distcp", "cut", "damaged"),
        ("__0_0.distcp", "flipped", "damaged"),
        ("ledger.json", "flipped", "damaged"),
        ("ledger.json", "noise", "damaged"),
        ("COMMITTED", "loop", "partial"),
        ("COMMITTED", "pipe", "partial"),
        ("COMMITTED", "folder", "partial"),
        ("manifest.json", "pipe", "damaged"),
        ("position.json", "loop", "damaged"),
        ("__0_0.distcp", "loop", "damaged"),
        ("adapter/adapter_model.safetensors", "gone", "damaged"),
    ],
)
def test_the_last_good_one_is_gone_on_from(tmp_path: Path, file: str, damage: str, condition: str) -> None:
    save(checkpoints(tmp_path), 1, 2)
    path = tmp_path / "step-000002" / file
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-1])
    elif damage == "noise":
        path.write_bytes(b"\xff" * len(content))
    elif damage in STAND_INS:
        path.unlink()
        STAND_INS[damage](path)
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    found = manifest.verify(FolderStorage(tmp_path), "step-000002")
    assert found.condition == condition
    if condition == "damaged":
        assert found.wrong == ((file,) if file != "manifest.json" or damage == "flipped" else ("manifest.json",))
    assert resumed_step(tmp_path) == 1
    # Also for those who look at sizes only: what does not load is no longer said to be the latest.
    latest = manifest.latest(FolderStorage(tmp_path))
    assert latest is not None
    assert latest.step == 1
    save(checkpoints(tmp_path), 2)
    assert resumed_step(tmp_path) == 2


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    save(checkpoints(tmp_path), 1)
    (tmp_path / "step-000001" / "ledger.json").write_text("another ledger")
    with pytest.raises(TrainingError, match="step-000001 damaged"):
        checkpoints(tmp_path).resume(blank(whole(1)))
    with pytest.raises(TrainingError, match="step-000001 damaged"):
        checkpoints(tmp_path).resume(blank(whole(1)))


def test_another_version_s_is_told_from_a_broken_one_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(checkpoints(tmp_path), 1, 2)
    folder = tmp_path / "step-000002"
    newer = (folder / "manifest.json").read_text().replace('"format": 2', '"format": 3')
    (folder / "manifest.json").write_text(newer)
    (folder / "COMMITTED").write_text(manifest.marker_text(newer))
    found = manifest.verify(FolderStorage(tmp_path), "step-000002")
    assert found.why == "its format is 3, this version of Flywheel knows 2: another has written it"
    assert resumed_step(tmp_path) == 1
    assert any("step-000002 is damaged and passed over: its format" in message for message in caplog.messages)


def test_a_copy_under_another_name_counts_for_nothing(tmp_path: Path) -> None:
    """Not once more for the same step either: the retention would count it."""
    save(checkpoints(tmp_path), 1, 2)
    shutil.copytree(tmp_path / "step-000002", tmp_path / "step-2")
    assert [each.name for each in manifest.committed(FolderStorage(tmp_path))] == ["step-000001", "step-000002"]


def test_what_may_not_be_read_is_said_and_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be as good as ever: the run must not begin again before it, nor write over it."""
    save(checkpoints(tmp_path), 1, 2)
    shard = tmp_path / "step-000002" / "__0_0.distcp"

    def refused(path: Path) -> str:
        if path == shard:  # root, who runs tests in containers, may read everything
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return digest_file(path)

    with monkeypatch.context() as patched:
        patched.setattr(manifest, "digest_file", refused)
        with pytest.raises(TrainingError, match=r"cannot be read .*Permission denied.*__0_0\.distcp"):
            checkpoints(tmp_path).resume(blank(whole(1)))
    assert resumed_step(tmp_path) == 2


def test_another_run_s_and_another_model_s_are_refused(tmp_path: Path) -> None:
    save(checkpoints(tmp_path, model=None), 1)
    with pytest.raises(TrainingError, match="does not fit this model"):
        checkpoints(tmp_path).resume(blank(whole(1, rows=6)))
    with pytest.raises(TrainingError, match="does not fit this model"):
        checkpoints(tmp_path).resume({"weights/other": torch.zeros(1)})
    mine = checkpoints(tmp_path)
    mine._run_id = "tiny-2"
    with pytest.raises(TrainingError, match=f"{RUN}, not of run tiny-2"):
        mine.resume(blank(whole(1)))


def test_a_repeated_save_leaves_what_is_there(tmp_path: Path) -> None:
    save(checkpoints(tmp_path), 1)
    before = (tmp_path / "step-000001" / "position.json").stat()
    save(checkpoints(tmp_path), 1)
    assert (tmp_path / "step-000001" / "position.json").stat().st_ino == before.st_ino
    assert names(tmp_path) == ["step-000001"]


def test_what_the_dead_left_is_cleared(tmp_path: Path) -> None:
    save(checkpoints(tmp_path), 1)
    for left in (".partial-step-000002-0a0b0c0d", ".partial-trash-step-000000-0a0b0c0d"):
        (tmp_path / left).mkdir()
    (tmp_path / "unsaid").mkdir()
    assert [found.condition for found in manifest.look(FolderStorage(tmp_path))] == ["committed", "partial"]
    assert resumed_step(tmp_path) == 1
    assert names(tmp_path) == ["step-000001", "unsaid"]


# ------------------------------------------------------------------------------------------------- full disks


class Full(FolderStorage):
    """A disk that is full while `full`, by its own count or when something is written."""

    full = True
    when = "counted"

    def free_bytes(self) -> int | None:
        return 1000 if self.full and self.when == "counted" else super().free_bytes()

    def store(self, scratch: Path, name: str, files: Iterable[str]) -> None:
        if self.full and self.when == "stored":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("when", ["counted", "stored"])
def test_a_full_disk_stops_the_save_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    save(checkpoints(tmp_path), 1)
    disk = Full(tmp_path)
    disk.when = when
    mine = checkpoints(disk)
    with caplog.at_level(logging.WARNING):
        mine.save(whole(2), at(2))
        settled = mine.finish()
    assert settled is not None
    assert isinstance(settled.failed, CapacityError)
    assert mine.take_metrics()["checkpoint_failed"] == 1
    [said] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "step-000002" in said
    assert "MiB are needed" in said
    assert "MiB are free" in said
    assert names(tmp_path) == ["step-000001"]
    mine.save(whole(3), at(3), ledger="ledger of 3")
    with pytest.raises(CapacityError, match="step-000003 of run tiny-1 cannot be saved"):
        mine.finish(insist=True)
    assert names(tmp_path) == ["step-000001"]
    mine.save(whole(4), at(4), ledger="ledger of 4")
    disk.full = False  # in time for the last save, or for its second try
    mine.finish(insist=True)
    assert names(tmp_path) == ["step-000001", "step-000004"]
    assert resumed_step(tmp_path) == 4


def test_a_write_that_breaks_off_is_a_disk_s_error_and_no_riddle(tmp_path: Path) -> None:
    """torch's zip writer would say that it could not write a file; we want to know why."""
    mine = checkpoints(tmp_path)
    big = {name: torch.zeros(400, 300) for name in whole(1)}
    with largest_file(300_000):
        mine.save(big, at(1))
        settled = mine.finish()
    assert settled is not None
    assert isinstance(settled.failed, CapacityError)
    assert "File too large" in settled.failed.message
    assert names(tmp_path) == []
    mine.save(big, at(2))
    settled = mine.finish()
    assert settled is not None
    assert settled.failed is None


def test_what_is_no_disk_s_error_is_raised(tmp_path: Path) -> None:
    class Broken(FolderStorage):
        def free_bytes(self) -> int | None:
            raise ZeroDivisionError

    mine = checkpoints(Broken(tmp_path))
    mine.save(whole(1), at(1))
    with pytest.raises(ZeroDivisionError):
        mine.save(whole(2), at(2))


# ------------------------------------------------------------------------------- the registry, and what may go


class Registry:
    """Hears of commits, in their order; away while `away`."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.needed: dict[int, str] = {}
        self.away = False

    def commit(self, position: Position, uri: str, metrics: dict[str, float]) -> None:
        self._ask()
        assert (Path(uri) / "COMMITTED").is_file()
        self.heard.append(position.step)

    def protected(self) -> dict[int, str]:
        self._ask()
        return self.needed

    def _ask(self) -> None:
        if self.away:
            raise DependencyError("The registry is away.")


def test_old_ones_go_but_what_is_needed_stays(tmp_path: Path) -> None:
    registry = Registry()
    save(checkpoints(tmp_path, keep=1), 1)
    mine = checkpoints(tmp_path, keep=1, on_commit=registry.commit, protected=registry.protected)
    assert mine.resume(blank(whole(1))) is not None  # 1 is what this run goes on from
    registry.needed = {3: "a version was made from it"}
    save(mine, 2, 3, 4, 5)
    assert names(tmp_path) == ["step-000001", "step-000003", "step-000005"]
    assert registry.heard == [1, 2, 3, 4, 5]


def test_while_the_registry_is_away_news_wait_and_nothing_goes(tmp_path: Path) -> None:
    registry = Registry()
    mine = checkpoints(tmp_path, keep=1, on_commit=registry.commit, protected=registry.protected)
    registry.away = True
    for step in (1, 2, 3):
        mine.save(whole(step), at(step))
    mine.finish()
    assert names(tmp_path) == ["step-000001", "step-000002", "step-000003"]
    mine.save(whole(4), at(4))
    with pytest.raises(DependencyError, match="away"):
        mine.finish(insist=True)
    registry.away = False
    mine.finish(insist=True)
    assert registry.heard == [1, 2, 3, 4]
    assert names(tmp_path) == ["step-000004"]


def test_who_goes_on_tells_what_a_dead_one_has_not_told(tmp_path: Path) -> None:
    save(checkpoints(tmp_path), 1, 2, 3)
    registry = Registry()
    mine = checkpoints(tmp_path, on_commit=registry.commit, protected=registry.protected)
    assert mine.resume(blank(whole(1))) is not None
    mine.finish(insist=True)
    assert registry.heard == [1, 2, 3]


def test_the_best_are_kept(tmp_path: Path) -> None:
    mine = checkpoints(tmp_path, policy={"keep": 1, "best": {"metric": "score", "mode": "max"}})
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.3)):
        mine.save(whole(step), at(step), metrics={"score": score})
    mine.finish(insist=True)
    assert names(tmp_path) == ["step-000002", "step-000003"]


def test_a_state_may_have_other_tensors_than_before(tmp_path: Path) -> None:
    mine = checkpoints(tmp_path, model=None)
    save(mine, 1)
    mine.save({"weights/other": torch.ones(2)}, at(2), ledger="ledger of 2")
    mine.finish(insist=True)
    state = {"weights/other": torch.zeros(2)}
    assert checkpoints(tmp_path).resume(state) is not None
    assert state["weights/other"].tolist() == [1, 1]
    with pytest.raises(AssertionError):
        assert_equal(whole(1), 2)  # the comparison that these tests rely on
