"""A published folder is whole or absent; a digest depends on names and bytes and on nothing else."""

import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.errors import ConfigError
from cluster.storage import (
    PARTIAL_PREFIX,
    abandoned,
    digest_folder,
    digest_of,
    file_digests,
    publish,
    require_file_name,
    write_atomically,
)


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


def test_a_digest_is_the_same_for_ever(tmp_path: Path) -> None:
    # Versions and models are named by it: it may never come out otherwise. `a/b` sorts before `a.txt`.
    (tmp_path / "f" / "a").mkdir(parents=True)
    for name in ("a.txt", "a/b", "B", "é"):
        (tmp_path / "f" / name).write_text(name)
    digests = file_digests(tmp_path / "f")
    assert list(digests) == ["B", "a.txt", "a/b", "é"]
    assert (
        digest_folder(tmp_path / "f")
        == digest_of(digests)
        == ("f35ad2d64ee9d52c393b192df195fff03f4b1edfd025c5f0536b0b2a498f2a12")
    )


@pytest.mark.parametrize("kind", ["file", "folder", "dangling", "pipe"])
def test_what_is_no_file_has_no_digest(tmp_path: Path, kind: str) -> None:
    (tmp_path / "f" / "inner").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    odd = tmp_path / "f" / "inner" / "odd"
    if kind == "pipe":
        os.mkfifo(odd)
    else:
        odd.symlink_to({"file": __file__, "folder": tmp_path / "outside", "dangling": "nowhere"}[kind])
    with pytest.raises(ConfigError, match=r"inner/odd in .* is (a symbolic link|no ordinary file)"):
        digest_folder(tmp_path / "f")


@pytest.mark.parametrize("name", [b"caf\xe9", b"line\nbreak"])
def test_a_name_that_cannot_be_written_down_has_no_digest(tmp_path: Path, name: bytes) -> None:
    (tmp_path / os.fsdecode(name)).write_text("x")
    with pytest.raises(ConfigError, match="unreadable name"):
        digest_folder(tmp_path)


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


def test_what_is_being_written_is_not_abandoned_and_what_was_left_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with publish(tmp_path / "v1") as scratch:
        with abandoned(scratch) as free:
            assert not free
        left = scratch.with_name(f"{PARTIAL_PREFIX}left")
        left.mkdir()
        for name in (left, tmp_path / "gone"):
            with abandoned(name) as free:
                assert free
    writing: list[bool] = []

    def look(_: int) -> None:
        for path in tmp_path.glob(f"{PARTIAL_PREFIX}state-*"):
            with abandoned(path) as free:
                writing.append(not free)

    monkeypatch.setattr(os, "fsync", look)
    write_atomically(tmp_path / "state", "x")
    assert writing == [True]


def test_a_scratch_that_is_taken_away_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, taken = fcntl.flock, list[Path]()

    def late(descriptor: int, how: int) -> None:
        if not taken:
            (scratch,) = tmp_path.glob(f"{PARTIAL_PREFIX}*")
            taken.append(scratch.rename(tmp_path / "trash"))
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with publish(tmp_path / "v1") as scratch:
        (scratch / "file").write_text("x")
    assert (tmp_path / "v1" / "file").read_text() == "x"
    assert list((tmp_path / "trash").iterdir()) == []


def test_write_atomically_replaces(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.json"
    write_atomically(path, "one")
    write_atomically(path, "two")
    assert path.read_text() == "two"
    assert [entry.name for entry in path.parent.iterdir()] == ["state.json"]


def test_a_secret_is_never_readable_by_others(tmp_path: Path) -> None:
    write_atomically(tmp_path / "key", "secret", mode=0o600)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden", "a\0b", "a b", "x" * 129, "a..b"])
def test_names_that_could_leave_their_folder_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        require_file_name(name, what="run id")


def test_ordinary_names_pass_unchanged() -> None:
    assert require_file_name("error-triage_1.2", what="run id") == "error-triage_1.2"
