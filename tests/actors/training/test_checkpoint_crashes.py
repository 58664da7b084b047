"""kill -9 at every file that a save changes: the last good checkpoint is there, and the run goes on from it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.training.checkpoint import manifest
from actors.training.checkpoint.export import export
from actors.training.checkpoint.saver import Checkpoints
from actors.training.checkpoint.storage import FolderStorage
from cluster.storage import PARTIAL_PREFIX, digest_folder
from tests.actors.training.saved import RUN, blank, checkpoints, resumed_step, save, whole
from tests.crashes import Crasher


@pytest.fixture(scope="module")
def crasher() -> Iterator[Crasher]:
    started = Crasher(warm=["tests.actors.training.saved"])
    yield started
    started.close()


def prepare(folder: Path) -> Checkpoints:
    """A process that goes on, with what the one before it has left."""
    mine = checkpoints(folder, keep=1)
    mine.resume(blank(whole(1)))
    return mine


def save_next(mine: Checkpoints) -> None:
    """Step 2; then step 1 is not kept any more."""
    mine._aftermath._resumed_from.clear()  # type: ignore[union-attr]
    save(mine, 2)


def test_whoever_dies_in_a_save_leaves_a_good_checkpoint(crasher: Crasher, tmp_path: Path) -> None:
    save(checkpoints(tmp_path), 1)
    deaths, left = 0, set()
    for where in crasher.deaths(prepare, save_next, tmp_path, root=tmp_path):
        deaths += 1
        good = manifest.latest(FolderStorage(tmp_path))
        assert good is not None, where
        left.add(good.step)
        assert manifest.verify(FolderStorage(tmp_path), good.name).condition == "committed", where
        # And a run goes on, without what the dead one left.
        assert resumed_step(tmp_path) == good.step, where
        assert all(path.name.startswith("step-") for path in tmp_path.iterdir()), where
        # Each death is in the same save.
        if good.step == 2:
            FolderStorage(tmp_path).remove("step-000002")
            save(checkpoints(tmp_path), 1)
    assert deaths > 20
    assert left == {1, 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002"]


def export_last(run: Path) -> None:
    storage = FolderStorage(run)
    export(storage, manifest.find(storage, None, run_id=RUN), run.parent / "adapter")


def test_whoever_dies_in_an_export_leaves_a_whole_folder_or_none(crasher: Crasher, tmp_path: Path) -> None:
    run, target = tmp_path / "run", tmp_path / "adapter"
    save(checkpoints(run), 1)
    deaths = 0
    for where in crasher.deaths(Path, export_last, run, root=tmp_path):
        deaths += 1
        assert all(path == run or path.name.startswith(PARTIAL_PREFIX) for path in tmp_path.iterdir()) or (
            digest_folder(target) == digest_folder(run / "step-000001" / "adapter")
        ), where
        if target.exists():
            shutil.rmtree(target)
        export_last(run)  # what the dead one left is in nobody's way
        shutil.rmtree(target)
    assert deaths > 5
    assert manifest.verify(FolderStorage(run), "step-000001").condition == "committed"
