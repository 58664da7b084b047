"""Retrieval tasks from folders in BEIR's format (Thakur et al. 2021): what to search, what to ask, what is right.

corpus.jsonl        {"_id", "title"?, "text"}
queries.jsonl       {"_id", "text"}
qrels/test.tsv      query-id  corpus-id  score, with a header; grades from 1 are relevant
"""

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.data.rows import content_id
from actors.evaluation.ranking import Judgements
from cluster.errors import ConfigError


@dataclass(frozen=True)
class RetrievalTask:
    """Texts by id, and which documents answer which query. Every query has at least one relevant document."""

    name: str
    corpus: Mapping[str, str]
    queries: Mapping[str, str]
    judgements: Judgements
    groups: Mapping[str, str] | None = None
    """What each query comes from (a package, a user): those of one group are alike. None: each is its own."""


def read(folder: Path, *, split: str = "test", queries: int | None = None) -> RetrievalTask:
    """The task in `folder`; queries that `split` has no relevant document for are left out.

    At most so many `queries`, chosen by a hash of their ids, so that a greater number only adds to them.

    A document's title stands before its text, with a space between, as BEIR's own models read it. `ConfigError` names
    the file and line at fault, also where a judgement names a query or document that there is not.
    """
    corpus = {
        id: " ".join(part for part in (row.get("title") or "", row["text"]) if part)
        for id, row in _texts(folder / "corpus.jsonl")
    }
    asked = {id: row["text"] for id, row in _texts(folder / "queries.jsonl")}
    judgements: dict[str, dict[str, int]] = {}
    path = folder / "qrels" / f"{split}.tsv"
    for where, query, document, grade in _judgements(path):
        if query not in asked:
            raise ConfigError(f"{where} judges the query {query!r}, which queries.jsonl does not have.")
        if document not in corpus:
            raise ConfigError(f"{where} judges the document {document!r}, which corpus.jsonl does not have.")
        judgements.setdefault(query, {})[document] = grade
    answerable = {query: graded for query, graded in judgements.items() if max(graded.values()) > 0}
    if queries is not None:
        chosen = set(sorted(answerable, key=content_id)[:queries])
        answerable = {query: graded for query, graded in answerable.items() if query in chosen}
    if not answerable:
        raise ConfigError(f"{path} has no relevant document for any query.", hint="Grades from 1 are relevant.")
    return RetrievalTask(folder.name, corpus, {query: asked[query] for query in answerable}, answerable)


def _texts(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    seen: set[str] = set()
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError:
            raise ConfigError(f"{where} is not JSON.") from None
        if not isinstance(row, dict) or not isinstance(row.get("_id"), str) or not isinstance(row.get("text"), str):
            raise ConfigError(f"{where} has no `_id` and `text`.", hint="Both are strings in BEIR's format.")
        if row["_id"] in seen:
            raise ConfigError(f"{where} has the id {row['_id']!r} a second time.")
        seen.add(row["_id"])
        yield row["_id"], row


def _judgements(path: Path) -> Iterator[tuple[str, str, str, int]]:
    rows = csv.reader(_lines(path), delimiter="\t", quoting=csv.QUOTE_NONE)
    for number, row in enumerate(rows, 1):
        where = f"{path}, line {number}"
        if not row or (number == 1 and row[-1] == "score"):
            continue
        try:
            query, document, grade = row
            yield where, query, document, int(grade)
        except ValueError:
            raise ConfigError(
                f"{where} is {row!r}, not a query, a document and a whole grade.", hint="Tabs separate the three."
            ) from None


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from file
    except FileNotFoundError:
        raise ConfigError(
            f"There is no {path}.", hint="A BEIR folder has corpus.jsonl, queries.jsonl and qrels/<split>.tsv."
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason}.") from None
