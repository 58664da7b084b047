"""What a source is called, and sources that cannot be built from; nothing here starts Ray."""

import json
import os
from pathlib import Path

import pytest

from actors.data.build import build, version_name
from actors.data.config import DataConfig, SourceConfig
from cluster.errors import ConfigError
from cluster.storage import Home, require_file_name

CONFIG = DataConfig(train=SourceConfig(source="rows"))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("tickets.jsonl", "tickets"),
        ("a..b.jsonl", "a.b"),
        ("a....jsonl", "a"),
        ("größe 1.csv", "gr--e-1"),
        ("python-errors", "python-errors"),
        ("python-errors.jsonl", "python-errors-file"),
    ],
)
def test_a_version_is_named_after_its_file(source: str, name: str) -> None:
    assert require_file_name(version_name(source), what="name") == name


def test_long_names_stay_different_and_leave_room_for_an_ending() -> None:
    one, other = (version_name("x" * 200 + end + ".jsonl") for end in "ab")
    assert one != other
    assert require_file_name(f"{one}.tokens", what="name")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("", "source is empty"),
        (" ", "source is empty"),
        ("x" * 300 + ".jsonl", "cannot be looked up"),
        ("~nouser/x.jsonl", "cannot be a path"),
        ("a\0b", "cannot be"),
        ("missing.jsonl", "no dataset, file or folder"),
    ],
)
def test_a_source_that_is_none_is_refused(tmp_path: Path, source: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        build(source, CONFIG, Home(tmp_path))
    assert caught.value.hint


def test_a_bad_row_more_is_another_version(tmp_path: Path) -> None:
    path, home = tmp_path / "rows.jsonl", Home(tmp_path / "home")
    rows = [json.dumps({"prompt": f"question {n} of {n * n}", "completion": "x"}) for n in range(40)]
    path.write_text("\n".join(rows) + "\n")
    first = build(str(path), CONFIG, home)
    assert build(str(path), CONFIG, home) == first
    path.write_text("\n".join([*rows, "{broken"]) + "\n")
    second = build(str(path), CONFIG, home)
    assert (first.quarantined, second.quarantined) == ({}, {"malformed": 1})
    assert second.id != first.id
    assert "{broken" in second.quarantine(home).read_text()


def test_rows_that_all_ask_the_same_cannot_be_split(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "p", "completion": f"x{n}"}) + "\n" for n in range(4)))
    with pytest.raises(ConfigError, match="All 4 usable rows ask the same question") as caught:
        build(str(path), CONFIG, Home(tmp_path / "home"))
    assert "column" not in str(caught.value.hint)


def test_a_saved_dataset_without_its_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    with pytest.raises(ConfigError, match="cannot be read"):
        build(str(tmp_path), CONFIG, Home(tmp_path / "home"))


def test_a_file_whose_name_is_not_utf8_is_refused_alone_and_read_in_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    path = folder / os.fsdecode(b"caf\xe9.jsonl")
    path.write_text("".join(json.dumps({"prompt": f"question {n}", "completion": "x"}) + "\n" for n in range(9)))
    with pytest.raises(ConfigError, match="cannot be looked up"):
        build(str(path), CONFIG, Home(tmp_path / "home"))
    built = build(str(folder), CONFIG, Home(tmp_path / "home"))
    assert sum(side.rows for side in built.splits.values()) == 9
