"""Pairs become rows that hold whole texts, each with its number; what is right is no negative."""

import json
from pathlib import Path

import pytest

from actors.data import examples, pairs, sources
from actors.data.mining import unnamed_functions, without_name
from actors.data.packing import NO_LOSS
from actors.data.rows import Origin, Row
from actors.data.version import head, store
from cluster.errors import ConfigError
from cluster.storage import Home


def tokenized(*texts: str) -> dict[str, object]:
    token_ids = [[1, *(ord(sign) for sign in text), 2] for text in texts]
    return {"id": "-".join(texts), "group": texts[0], "texts": list(texts), "token_ids": token_ids}


def test_a_row_holds_its_texts_one_behind_the_other() -> None:
    side = pairs.content([tokenized("q", "ab", "c"), tokenized("r", "q")], {})
    first, second = side.table.to_pylist()
    assert first["input_ids"] == [1, 113, 2, 1, 97, 98, 2, 1, 99, 2]
    assert first["position_ids"] == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2]
    assert first["labels"] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    # Equal texts have one number, wherever they stand.
    assert second["labels"] == [3, 3, 3, 0, 0, 0, *[NO_LOSS] * 4]
    assert (side.examples, side.loss_tokens, side.tokens, side.groups) == (2, 2, 16, 2)


def test_negatives_that_are_right_are_dropped() -> None:
    rows = [tokenized("q", "a", "b", "x", "q"), tokenized("q", "b", "a", "y"), tokenized("r", "a", "b")]
    assert pairs.drop_false_negatives(rows) == 3
    assert [row["texts"] for row in rows] == [["q", "a", "x"], ["q", "b", "y"], ["r", "a", "b"]]
    assert [len(row["token_ids"]) for row in rows] == [3, 3, 3]  # type: ignore[arg-type]


def test_a_users_negatives_are_read(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    lines = [
        {"query": "one", "positive": "1", "negatives": ["2", "3"]},
        {"query": "two", "positive": "2", "negative": "1"},
        {"query": "three", "positive": "3"},
        {"query": "four", "positive": "4", "negatives": "no list"},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    read = sources.read(path)
    assert [row.negatives for row in read.rows] == [("2", "3"), ("1",), ()]
    assert [(one.reason, one.line) for one in read.rejected] == [("malformed", 4)]


def test_pairs_keep_their_negatives(tmp_path: Path) -> None:
    home = Home(tmp_path)
    rows = [Row("1", "g", Origin("f", 1), query="q", positive="p", negatives=("n", "m")), Row("2", "g", Origin("f", 2))]
    stored = store(
        home,
        name="pairs",
        stage="examples",
        shape="pairs",
        parent=None,
        contents={"train": examples.content("pairs", rows), "test": examples.content("pairs", [])},
        rejected=[],
        dropped={},
        config={},
        fingerprint="f",
    )
    read = examples.read(stored, "train", home)
    assert [each.negatives for each in read if isinstance(each, examples.PairExample)] == [("n", "m"), ()]
    assert head(stored.shards("train", home), 1).num_rows == 1


def test_a_prompt_is_read_from_the_model(tmp_path: Path) -> None:
    assert pairs.prompt_of(tmp_path) == ""
    settings = {"prompts": {"query": "ask: "}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    assert pairs.prompt_of(tmp_path) == "ask: "
    (tmp_path / "config_sentence_transformers.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        pairs.prompt_of(tmp_path)


def test_a_function_loses_its_name_and_nothing_else() -> None:
    code = "async def get(self, get_all):\n    return super().get(self.get(get_all), other.get(1)) or get(2)"
    assert without_name(code) == (
        "async def f(self, get_all):\n    return super().f(self.f(get_all), other.get(1)) or f(2)"
    )
    assert without_name("@cached\ndef load(x): return load(x)") == "@cached\ndef f(x): return f(x)"
    source = '''
def read_in_chunks(file, size):
    """Read a file piece by piece until it ends."""
    while piece := file.read(size):
        yield piece
    yield from read_in_chunks(file, size)
'''
    (found,) = unnamed_functions(source.encode())
    assert found.text == "Read a file piece by piece until it ends."
    assert "read_in_chunks" not in found.answer
    assert "def f(file, size):" in found.answer
