"""Reading the examples of a data version back, in plain Python, for evaluation, indexing and looking.

Knows the columns of the examples stage, both ways. Does not know Ray: training is fed by `feed`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from actors.data.config import Split
from actors.data.rows import Message, Row, Shape, turns
from actors.data.version import DataVersion, SplitContent, digest_of, head
from cluster.errors import ConfigError
from cluster.storage import Home

_ORIGIN = pa.struct([("file", pa.string()), ("line", pa.int32()), ("package", pa.string()), ("version", pa.string())])
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
SCHEMAS: dict[Shape, pa.Schema] = {
    "chat": pa.schema(
        [("id", pa.string()), ("row", pa.int64()), ("group", pa.string()), ("messages", _MESSAGES), ("origin", _ORIGIN)]
    ),
    "pairs": pa.schema(
        [
            ("id", pa.string()),
            ("row", pa.int64()),
            ("group", pa.string()),
            ("query", pa.string()),
            ("positive", pa.string()),
            ("negatives", pa.list_(pa.string())),
            ("origin", _ORIGIN),
        ]
    ),
}
"""`row` is the position in the split, so that a prefix can be asked for in any reading order."""


@dataclass(frozen=True)
class ChatExample:
    """One conversation; the last message is the answer."""

    id: str
    messages: list[Message]
    group: str


@dataclass(frozen=True)
class PairExample:
    """A query, the text that answers it, and texts that only look as if they did."""

    id: str
    query: str
    positive: str
    group: str
    negatives: tuple[str, ...] = ()


def read(
    version: DataVersion, split: Split, home: Home, *, limit: int | None = None
) -> list[ChatExample] | list[PairExample]:
    """The first `limit` examples of a side. Rows stand in the order of a hash, so these are a fair sample, and
    a bigger limit only adds to them. `ConfigError` for a version of the tokens stage."""
    table = _table(version, split, home, limit, ("id", "group", "messages", "query", "positive", "negatives"))
    if version.shape == "chat":
        return [ChatExample(one["id"], turns(one["messages"]), one["group"]) for one in table.to_pylist()]
    # Versions that were made before pairs could have negatives lack the column.
    return [PairExample(**{**one, "negatives": tuple(one.get("negatives") or ())}) for one in table.to_pylist()]


def content(shape: Shape, rows: Sequence[Row]) -> SplitContent:
    """`rows` in their published order as the content of a side."""
    records = [
        {
            "id": row.id,
            "row": number,
            "group": row.group,
            "origin": {
                "file": row.origin.file,
                "line": row.origin.line,
                "package": row.origin.package,
                "version": row.origin.version,
            },
            **(
                {"messages": list(row.messages)}
                if shape == "chat"
                else {"query": row.query, "positive": row.positive, "negatives": list(row.negatives)}
            ),
        }
        for number, row in enumerate(rows)
    ]
    return SplitContent(
        table=pa.Table.from_pylist(records, schema=SCHEMAS[shape]),
        digest=digest_of(records),
        groups=len({row.group for row in rows}),
    )


def _table(version: DataVersion, split: Split, home: Home, limit: int | None, wanted: Sequence[str]) -> pa.Table:
    if version.stage != "examples":
        raise ConfigError(
            f"{version.id} holds tokens, not examples.", hint=f"Read its parent instead: {version.parent}."
        )
    files = version.shards(split, home)
    columns = [name for name in wanted if name in SCHEMAS[version.shape].names]
    if "negatives" in columns and "negatives" not in _names(files[0]):
        columns.remove("negatives")
    return head(files, limit, columns)


def _names(file: Path) -> list[str]:
    """The columns of a Parquet file; none if it cannot be read, which whoever reads its rows will say."""
    try:
        return list(pq.read_schema(file).names)
    except (pa.ArrowException, OSError):
        return []
