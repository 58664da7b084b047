"""Users' own files: every format and shape, and rows that cannot be used."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.data import sources
from actors.data.rows import Row
from cluster.errors import ConfigError

QUESTION, ANSWER = "What is 2 + 2?", "4"
TURNS = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]


def _jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "record",
    [
        {"messages": TURNS},
        {"prompt": QUESTION, "completion": ANSWER},
        {"prompt": TURNS[:1], "completion": TURNS[1:]},
        {"instruction": QUESTION, "output": ANSWER},
        {"instruction": QUESTION, "input": "", "output": ANSWER, "note": "other columns do not matter"},
    ],
    ids=["messages", "prompt", "conversational prompt", "instruction", "empty input"],
)
def test_one_conversation_in_any_shape_is_the_same_row(tmp_path: Path, record: dict[str, Any]) -> None:
    read = sources.read(_jsonl(tmp_path / "rows.jsonl", [record]))
    assert read.shape == "chat"
    assert [list(row.messages) for row in read.rows] == [TURNS]
    reference = sources.read(_jsonl(tmp_path / "reference.jsonl", [{"messages": TURNS}])).rows[0]
    assert (read.rows[0].id, read.rows[0].group) == (reference.id, reference.group)


def test_an_input_follows_its_instruction(tmp_path: Path) -> None:
    record = {"instruction": "Add.", "input": "2 and 2", "output": "4"}
    [row] = sources.read(_jsonl(tmp_path / "rows.jsonl", [record])).rows
    assert row.messages[0]["content"] == "Add.\n\n2 and 2"


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


WRITERS = {
    ".jsonl": lambda path, rows: _jsonl(path, rows),
    ".json": lambda path, rows: path.write_text(json.dumps(rows)),
    ".csv": _write_csv,
    ".parquet": lambda path, rows: pq.write_table(pa.Table.from_pylist(rows), path),
}
PAIRS = [
    {"query": "sum of two", "positive": "def add(a, b):\n    return a + b", "group": "math"},
    {"query": 'größer, "länger"', "positive": "x > y", "group": "order"},
]


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"pairs{suffix}"
    WRITERS[suffix](path, PAIRS)
    read = sources.read(path)
    assert read.shape == "pairs"
    assert [{"query": row.query, "positive": row.positive, "group": row.group} for row in read.rows] == PAIRS
    assert {row.origin.file for row in read.rows} == {path.name}


def test_a_folder_that_datasets_saved_keeps_its_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(PAIRS)
    whole.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train_sft": whole, "test_sft": whole.select([0])}).save_to_disk(tmp_path / "two")
    assert [row.split for row in sources.read(tmp_path / "one").rows] == [None, None]
    read = sources.read(tmp_path / "two")
    assert [(row.query, row.split) for row in read.rows] == [
        (PAIRS[0]["query"], "train"), (PAIRS[1]["query"], "train"), (PAIRS[0]["query"], "test")
    ]  # fmt: skip


def test_a_folder_of_train_and_test_files_says_the_split_and_parts_do_not(tmp_path: Path) -> None:
    for name in ("train-00000", "validation"):
        _jsonl(tmp_path / f"{name}.jsonl", PAIRS)
    assert [row.split for row in sources.read(tmp_path).rows] == ["train", "train", "test", "test"]
    (tmp_path / "validation.jsonl").rename(tmp_path / "trains.jsonl")
    assert {row.split for row in sources.read(tmp_path).rows} == {None}


def test_bad_rows_are_handed_back_with_their_reason_and_the_rest_is_read(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"messages": TURNS},
        '{"messages": [',
        "[1, 2]",
        {"prompt": "no messages here"},
        {"messages": TURNS[:1]},
        {"messages": [{"role": "tool", "content": "x"}, *TURNS]},
        {"messages": [TURNS[0], {"role": "assistant", "content": " "}]},
        '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "x"}]}',
        {"messages": TURNS[1:]},
        {"messages": TURNS, "group": 7},
    ]
    read = sources.read(_jsonl(tmp_path / "rows.jsonl", rows))
    assert [row.origin.line for row in read.rows] == [1, 10]
    assert read.rows[1].group == "7"
    assert [(bad.line, bad.reason) for bad in read.rejected] == [
        (2, "malformed"),
        (3, "malformed"),
        (4, "missing-value"),
        (5, "no-answer"),
        (6, "unknown-role"),
        (7, "missing-value"),
        (8, "not-utf8"),
        (9, "no-question"),
    ]
    assert all(bad.detail and bad.row for bad in read.rejected)


def test_bytes_that_are_not_text_reject_their_row_only(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"prompt,completion\ncaf\xe9,x\nfine,y\nfine,y,z\n")
    read = sources.read(tmp_path / "rows.csv")
    assert len(read.rows) == 1
    assert [bad.reason for bad in read.rejected] == ["not-utf8", "malformed"]
    (tmp_path / "rows.jsonl").write_bytes(b'{"query": "caf\xe9", "positive": "x"}\n{"query": "q", "positive": "x"}\n')
    assert [bad.reason for bad in sources.read(tmp_path / "rows.jsonl").rejected] == ["malformed"]


def test_an_unknown_shape_names_its_columns_and_the_known_shapes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="question, answer") as caught:
        sources.read(_jsonl(tmp_path / "rows.jsonl", [{"question": "q", "answer": "a"}]))
    assert "prompt/completion" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("rows.xlsx", "x", "unknown format"),
        ("rows.json", '{"a": 1}', "not a list"),
        ("rows.json", "{", "not JSON"),
        ("rows.parquet", "x", "not Parquet"),
        ("rows.jsonl", "", "is empty"),
        ("rows.jsonl", "\n\n", "holds no row"),
        ("rows.csv", "prompt,completion\n", "holds no row"),
        ("rows.jsonl", "\0\1binary\n", "not UTF-8 text"),
        ("rows.csv", "\0\1binary\nx\n", "not UTF-8 text"),
        ("rows.jsonl", "[1]\n", "line 1: list, not an object"),
        ("rows.jsonl", "[" * 100_000, "no usable row"),
        ("rows.json", "[" * 100_000, "not JSON"),
        ("rows.json", "", "is empty"),
        ("rows.jsonl", '{"prompt": "", "completion": ""}', "no usable row: missing-value"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, name: str, content: str, expected: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=expected):
        sources.read(tmp_path / name)


def test_rows_without_a_group_share_one_if_they_ask_the_same(tmp_path: Path) -> None:
    records = [{"prompt": "p", "completion": text} for text in "xy"] + [{"prompt": "q", "completion": "x"}]
    rows: list[Row] = sources.read(_jsonl(tmp_path / "rows.jsonl", records)).rows
    assert rows[0].group == rows[1].group != rows[2].group
    assert len({row.id for row in rows}) == 3


def test_most_rows_decide_the_shape_and_of_equals_the_first_known(tmp_path: Path) -> None:
    asked: list[Any] = [{"prompt": f"p{number}", "completion": "x"} for number in range(40)]
    read = sources.read(_jsonl(tmp_path / "rows.jsonl", [{"messages": TURNS}, *asked]))
    assert (len(read.rows), [(bad.line, bad.reason) for bad in read.rejected]) == (40, [(1, "missing-value")])
    tied = sources.read(_jsonl(tmp_path / "tied.jsonl", [asked[0], {"messages": TURNS}]))
    assert [row.origin.line for row in tied.rows] == [2]
    # Parquet gives every row every column: an empty one does not count.
    table = pa.Table.from_pylist([{"messages": TURNS, "prompt": None, "completion": None}, *asked])
    pq.write_table(table, tmp_path / "rows.parquet")
    assert len(sources.read(tmp_path / "rows.parquet").rows) == 40


def test_odd_values_reject_their_row_only(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"messages": TURNS},
        {"messages": [{"role": ["user"], "content": "x"}]},
        {"messages": TURNS, "group": [1]},
        "[" * 100_000,
    ]
    read = sources.read(_jsonl(tmp_path / "rows.jsonl", rows))
    assert len(read.rows) == 1
    bad = [(one.line, one.reason) for one in read.rejected]
    assert bad == [(2, "unknown-role"), (3, "malformed"), (4, "malformed")]
    assert max(len(bad.row) for bad in read.rejected) <= 500


def test_a_long_csv_cell_is_read_as_a_long_json_value_is(tmp_path: Path) -> None:
    _write_csv(tmp_path / "rows.csv", [{"prompt": "p" * 1_000_000, "completion": "x"}])
    [row] = sources.read(tmp_path / "rows.csv").rows
    assert len(row.messages[0]["content"]) == 1_000_000


def test_a_folder_named_like_a_file_is_passed_over(tmp_path: Path) -> None:
    _jsonl(tmp_path / "rows.jsonl", PAIRS)
    (tmp_path / "sub.jsonl").mkdir()
    assert sources.files(tmp_path) == [tmp_path / "rows.jsonl"]


@pytest.mark.parametrize("content", ["{bad", "{}", "[]", '{"splits": [1]}'])
def test_a_broken_dataset_dict_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "dataset_dict.json").write_text(content)
    with pytest.raises(ConfigError, match=r"dataset_dict\.json does not list the splits"):
        sources.read(tmp_path)


def test_a_path_that_cannot_be_looked_up_is_named(tmp_path: Path) -> None:
    for look in (sources.files, sources.read):
        with pytest.raises(ConfigError, match=r"cannot be read|no file or folder"):
            look(tmp_path / ("x" * 300 + ".jsonl"))
