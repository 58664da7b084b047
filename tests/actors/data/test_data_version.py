"""Published versions: found by name, id and inputs; equal content is one version; damage is seen."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from actors.data import examples, version
from actors.data.config import DataConfig, SourceConfig
from actors.data.rows import Message, Origin, Rejected, Row
from actors.data.version import DataVersion
from cluster.errors import ConfigError, StateError
from cluster.storage import Home


def _rows(count: int, tag: str = "") -> list[Row]:
    return [
        Row(
            id=f"{tag}{number}",
            group=f"g{number % 3}",
            origin=Origin("file.py", number, "package", "1.0"),
            messages=(Message(role="user", content=f"q{number}"), Message(role="assistant", content="a")),
        )
        for number in range(count)
    ]


def _store(home: Home, train: list[Row], **changed: Any) -> DataVersion:
    settings: dict[str, Any] = {
        "name": "errors",
        "stage": "examples",
        "shape": "chat",
        "parent": None,
        "contents": {"train": examples.content("chat", train), "test": examples.content("chat", _rows(2, "t"))},
        "rejected": [Rejected("too-long", "900 tokens", "file.py", 3, "text")],
        "dropped": {"exact-duplicate": 4},
        "config": {"seed": 0},
        "fingerprint": "f",
        **changed,
    }
    return version.store(home, **settings)


def test_what_was_stored_is_read_back_in_order(tmp_path: Path) -> None:
    home = Home(tmp_path)
    rows = _rows(7)
    stored = _store(home, rows)
    assert version.load(home, "errors") == version.load(home, stored.id) == stored
    assert stored.id == f"errors@{stored.digest[:12]}"
    assert stored.folder(home) == home.data / "errors" / stored.digest[:12]
    read = examples.read(stored, "train", home)
    assert read == [examples.ChatExample(row.id, list(row.messages), row.group) for row in rows]
    assert examples.read(stored, "train", home, limit=3) == read[:3]
    assert (stored.splits["train"].rows, stored.splits["train"].groups) == (7, 3)
    assert stored.quarantined == {"too-long": 1}
    assert "900 tokens" in stored.quarantine(home).read_text()


def test_pairs_keep_query_and_positive(tmp_path: Path) -> None:
    home = Home(tmp_path)
    pairs = [Row("1", "g", Origin("f", 1), query="q", positive="p")]
    content = {"train": examples.content("pairs", pairs), "test": examples.content("pairs", [])}
    stored = _store(home, [], name="functions", shape="pairs", contents=content)
    assert examples.read(stored, "train", home) == [examples.PairExample("1", "q", "p", "g")]
    assert examples.read(stored, "test", home) == []


def test_rows_beyond_a_shard_go_into_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "ROWS_PER_SHARD", 3)
    home = Home(tmp_path)
    stored = _store(home, _rows(7))
    assert [shard.rows for shard in stored.splits["train"].files] == [3, 3, 1]
    assert [one.id for one in examples.read(stored, "train", home, limit=5)] == ["0", "1", "2", "3", "4"]


def test_equal_content_and_settings_are_one_version_and_a_change_is_another(tmp_path: Path) -> None:
    home = Home(tmp_path)
    first = _store(home, _rows(7))
    assert _store(home, _rows(7)) == first
    others = [
        _store(home, _rows(8)),
        _store(home, _rows(7)[::-1]),
        _store(home, [dataclasses.replace(row, group="one") for row in _rows(7)]),
        _store(home, _rows(7), config={"seed": 1}),
        _store(home, _rows(7), rejected=[]),
        _store(home, _rows(7), dropped={}),
    ]
    assert len({first.id, *(other.id for other in others)}) == 7
    assert len(version.versions(home)) == 7
    assert [dict(other.quarantined) for other in others[-2:]] == [{}, {"too-long": 1}]
    assert others[-1].dropped == {}


def test_inputs_find_their_version(tmp_path: Path) -> None:
    home = Home(tmp_path)
    stored = _store(home, _rows(7), fingerprint="these")
    assert version.find(home, "errors", "these") == stored
    assert version.find(home, "errors", "others") is None
    assert version.find(home, "functions", "these") is None


def test_the_newest_of_a_name_is_loaded_and_an_unknown_one_lists_what_exists(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with pytest.raises(ConfigError) as nothing:
        version.load(home, "errors")
    assert "flywheel data build" in str(nothing.value.hint)
    _store(home, _rows(3))
    newest = _store(home, _rows(4))
    assert version.load(home, "errors") == newest
    with pytest.raises(ConfigError) as misspelt:
        version.load(home, "erors")
    assert "'errors'" in str(misspelt.value.hint)
    with pytest.raises(ConfigError) as unknown:
        version.load(home, "errors@000000000000")
    assert newest.id in str(unknown.value.hint)


def test_a_changed_or_missing_shard_is_noticed(tmp_path: Path) -> None:
    home = Home(tmp_path)
    stored = _store(home, _rows(7))
    version.verify(stored, home)
    [shard] = stored.shards("test", home)
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(StateError, match=r"test-00000\.parquet is changed"):
        version.verify(stored, home)
    shard.unlink()
    with pytest.raises(StateError, match="is missing"):
        version.verify(stored, home)


def test_reading_a_deleted_or_damaged_shard_says_how_to_mend_it(tmp_path: Path) -> None:
    home = Home(tmp_path)
    stored = _store(home, _rows(7))
    [shard] = stored.shards("train", home)
    shard.write_bytes(b"x")
    with pytest.raises(StateError, match="cannot be read") as damaged:
        examples.read(stored, "train", home)
    assert str(stored.folder(home)) in str(damaged.value.hint)
    shard.unlink()
    with pytest.raises(StateError, match=r"train-00000\.parquet is missing"):
        examples.read(stored, "train", home)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"{}"])
def test_a_damaged_manifest_matters_to_its_own_version_only(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    home = Home(tmp_path)
    sound = _store(home, _rows(3))
    broken = _store(home, _rows(4), name="other")
    (broken.folder(home) / "manifest.json").write_bytes(content)
    assert version.load(home, "errors") == version.load(home, sound.id) == sound
    assert version.versions(home) == [sound]
    assert str(broken.folder(home)) in caplog.text
    for reference in ("other", broken.id):
        with pytest.raises(StateError, match="cannot be read"):
            version.load(home, reference)


def test_evaluating_on_the_training_split_is_refused() -> None:
    train = SourceConfig(source="python-errors")
    with pytest.raises(ValueError, match=r"set eval\.split to 'test'"):
        DataConfig(train=train, eval=SourceConfig(source="python-errors"))
    assert DataConfig(train=train, eval=SourceConfig(source="python-errors", split="test")).eval is not None
