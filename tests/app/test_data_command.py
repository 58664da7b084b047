"""`flywheel data`: what it takes and what it shows; versions are made by hand, without Ray."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from actors.data import examples, version
from actors.data.rows import Message, Origin, Rejected, Row
from actors.data.version import DataVersion
from app.cli import data, output
from cluster.errors import ConfigError
from cluster.storage import Home


def _store(home: Home, test_rows: int, **changed: Any) -> DataVersion:
    messages = (Message(role="user", content="[bold]q"), Message(role="assistant", content="a"))
    rows = [Row(str(number), f"g{number}", Origin("rows.jsonl", number), messages=messages) for number in range(4)]
    sides = {"train": rows, "test": rows[:test_rows]}
    settings: dict[str, Any] = {
        "name": "a-name-that-is-much-longer-than-the-table-below-it-and-than-eighty-columns-of-a-terminal",
        "stage": "examples",
        "shape": "chat",
        "parent": None,
        "contents": {side: examples.content("chat", part) for side, part in sides.items()},
        "rejected": [],
        "dropped": {},
        "config": {"near_duplicate_similarity": 0.8},
        "fingerprint": "f",
        **changed,
    }
    return version.store(home, **settings)


def _shown(home: Home, monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    monkeypatch.setenv("FLYWHEEL_HOME", str(home.root))
    [made] = version.versions(home)
    with monkeypatch.context() as patched:
        file = (home.root / "out").open("w+")
        patched.setattr(output.console, "file", file)
        result = CliRunner().invoke(data.cli, ["show", made.id, *options])
        file.seek(0)
        shown = file.read()
        file.close()
    assert result.exit_code == 0, result.exception
    return shown


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("test_fraction=0.5", "data.test_fraction"),
        ("test_fractoin=0.5", "data.test_fraction"),
        ("batch.size=4", "data.max_length"),
    ],
)
def test_a_key_outside_data_is_refused_with_the_key_that_was_meant(assignment: str, expected: str) -> None:
    with pytest.raises(ConfigError, match="unknown key") as caught:
        data._settings("rows.jsonl", [assignment])
    assert expected in str(caught.value.hint)


def test_faults_name_the_key_as_it_is_written() -> None:
    with pytest.raises(ConfigError, match=r"data\.test_fraction: "):
        data._settings("rows.jsonl", ["data.test_fraction=2"])
    with pytest.raises(ConfigError, match=r"data\.sed: unknown key; did you mean 'seed'"):
        data._settings("rows.jsonl", ["data.sed=2"])
    config, source = data._settings("rows.jsonl", ["data.test_fraction=0.5"])
    assert (config.test_fraction, source) == (0.5, "rows.jsonl")


def test_what_was_left_out_and_where_it_stands_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path)
    rejected = [Rejected("malformed", "not JSON", "rows.jsonl", 3, "{")]
    made = _store(home, 0, rejected=rejected, dropped={"near-duplicate-of-train": 2})
    shown = _shown(home, monkeypatch)
    lines = shown.splitlines()
    assert lines[0] == made.id
    assert f"Each with its reason in {made.quarantine(home)}" in lines
    assert "near-duplicate-of-train" in shown
    assert "[bold]q" in shown
    [warning] = [line for line in lines if line.startswith("Warning")]
    assert "the test split is empty. 2 rows" in warning
    assert "data.near_duplicate_similarity (now 0.8" in warning
    facts = json.loads(_shown(home, monkeypatch, "--json"))
    assert (facts["dropped"], facts["quarantine"]) == (made.dropped, str(made.quarantine(home)))


def test_a_sound_version_has_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path)
    _store(home, 2)
    shown = _shown(home, monkeypatch)
    assert not {"Warning", "Dropped", "Quarantined"} & set(shown.split())
