"""BEIR folders: what is read, and what is refused with its place."""

import json
from pathlib import Path

import pytest

from actors.evaluation import beir
from cluster.errors import ConfigError

DOCUMENTS = [{"_id": "d1", "title": "Snow", "text": "It is white."}, {"_id": "d2", "title": "", "text": "Rain wets."}]
QUESTIONS = [{"_id": "q1", "text": "What is white?"}, {"_id": "q2", "text": "Who asks?"}]
HEADER = "query-id\tcorpus-id\tscore"


def folder(tmp_path: Path, *judgements: str, documents: str | None = None) -> Path:
    (tmp_path / "qrels").mkdir()
    lines = "\n".join(json.dumps(row) for row in DOCUMENTS) if documents is None else documents
    (tmp_path / "corpus.jsonl").write_text(lines + "\n", encoding="utf-8")
    (tmp_path / "queries.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)), encoding="utf-8")
    (tmp_path / "qrels" / "test.tsv").write_text("\n".join([HEADER, *judgements]) + "\n", encoding="utf-8")
    return tmp_path


def test_a_task_is_read_with_titles_and_without_queries_that_nothing_answers(tmp_path: Path) -> None:
    task = beir.read(folder(tmp_path, "q1\td1\t2", "q1\td2\t0", "q2\td2\t0"))
    assert task.corpus == {"d1": "Snow It is white.", "d2": "Rain wets."}
    assert task.queries == {"q1": "What is white?"}
    assert task.judgements == {"q1": {"d1": 2, "d2": 0}}


def test_fewer_queries_are_the_same_whatever_else_is_asked(tmp_path: Path) -> None:
    path = folder(tmp_path, "q1\td1\t2", "q2\td2\t1")
    (first,) = beir.read(path, queries=1).queries
    assert set(beir.read(path, queries=2).queries) == {"q1", "q2"}
    assert list(beir.read(path, queries=1).judgements) == [first]
    assert set(beir.read(path, queries=1).corpus) == {"d1", "d2"}


@pytest.mark.parametrize(
    ("judgement", "said"),
    [
        ("q9\td1\t1", "line 2 judges the query 'q9'"),
        ("q1\td9\t1", "line 2 judges the document 'd9'"),
        ("q1\td1", r"line 2 is \['q1', 'd1'\]"),
        ("q1\td1\tgood", "line 2 is .*'good'"),
        ("q1\td1\t0", "no relevant document for any query"),
    ],
)
def test_a_judgement_that_makes_no_sense_is_named(tmp_path: Path, judgement: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        beir.read(folder(tmp_path, judgement))


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        ("nonsense", "line 1 is not JSON"),
        ('{"_id": 7, "text": "x"}', "line 1 has no `_id` and `text`"),
        ('{"_id": "d1", "text": "x"}\n{"_id": "d1", "text": "y"}', "line 2 has the id 'd1' a second time"),
    ],
)
def test_a_document_that_makes_no_sense_is_named(tmp_path: Path, documents: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"corpus.jsonl, {said}"):
        beir.read(folder(tmp_path, "q1\td1\t1", documents=documents))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    made = folder(tmp_path, "q1\td1\t1")
    with pytest.raises(ConfigError, match=r"There is no .*dev\.tsv"):
        beir.read(made, split="dev")
