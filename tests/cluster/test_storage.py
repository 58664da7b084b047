"""A published folder is whole or absent; a digest depends on names and bytes and on nothing else."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.errors import ConfigError
from cluster.storage import PARTIAL_PREFIX, digest_folder, publish, require_file_name, write_atomically


def test_digest_counts_names_and_bytes_but_not_times(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "x").write_text("1")
    first = digest_folder(folder)
    os.utime(folder / "inner" / "x", (1, 1))
    assert digest_folder(folder) == first
    (folder / "inner" / "x").rename(folder / "inner" / "y")
    renamed = digest_folder(folder)
    assert renamed != first
    (folder / "inner" / "y").write_text("2")
    assert digest_folder(folder) != renamed


def test_publish_leaves_nothing_when_the_block_fails(tmp_path: Path) -> None:
    target = tmp_path / "store" / "v1"

    def die_half_way() -> None:
        with publish(target) as scratch:
            (scratch / "part").write_text("x")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        die_half_way()
    assert list((tmp_path / "store").iterdir()) == []


def test_two_publishers_of_the_same_target_both_succeed(tmp_path: Path) -> None:
    target = tmp_path / "v1"

    def make(_: int) -> None:
        with publish(target) as scratch:
            (scratch / "file").write_text("same")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, range(8)))
    assert (target / "file").read_text() == "same"
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


def test_an_unfinished_folder_is_recognisable(tmp_path: Path) -> None:
    with publish(tmp_path / "v1") as scratch:
        assert scratch.name.startswith(PARTIAL_PREFIX)
        assert not (tmp_path / "v1").exists()


def test_write_atomically_replaces(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.json"
    write_atomically(path, "one")
    write_atomically(path, "two")
    assert path.read_text() == "two"
    assert [entry.name for entry in path.parent.iterdir()] == ["state.json"]


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden", "a\0b", "a b", "x" * 129, "a..b"])
def test_names_that_could_leave_their_folder_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        require_file_name(name, what="run id")


def test_ordinary_names_pass_unchanged() -> None:
    assert require_file_name("error-triage_1.2", what="run id") == "error-triage_1.2"
