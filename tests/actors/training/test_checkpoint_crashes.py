"""kill -9 at every file that a save changes: the last good checkpoint is there, and the run goes on from it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.training.checkpoint import manifest
from actors.training.checkpoint.saver import Checkpoints
from actors.training.checkpoint.storage import FolderStorage
from tests.actors.training.saved import blank, checkpoints, resumed_step, save, whole
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
