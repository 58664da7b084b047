"""Users' own files as rows: the formats and shapes that people already have.

Owns reading and validating. A row that cannot be used is handed back with its reason; only a file or a shape
that cannot be used at all is an error. Does not know the split, tokenizers or Ray; the rows are held in memory.
"""

import codecs
import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from actors.data.config import Split
from actors.data.rows import Message, Origin, Rejected, Row, Shape, asked, content_id
from cluster.errors import ConfigError

SHAPES = {
    "messages": ("messages",),
    "prompt/completion": ("prompt", "completion"),
    "instruction/input/output": ("instruction", "output"),
    "query/positive": ("query", "positive"),
}
"""Known shapes and the columns that each must have; the one that most rows fit is taken, of equals the first."""

_FORMATS = ".jsonl, .ndjson, .json, .parquet, .csv, or a folder that datasets.save_to_disk wrote"
_ROLES = frozenset({"system", "user", "assistant"})
_SIDE = re.compile(r"(train|test|validation|valid|val|dev|eval)(?![a-z])", re.IGNORECASE)
_QUOTED_CHARS = 500
_SAMPLED_ROWS = 1000
_CELL_CHARS = 2**31 - 1  # as good as no limit, as for JSON lines; csv's own is 128 KiB
_PROBED_BYTES = 8192

Record = Mapping[str, Any]


@dataclass(frozen=True)
class SourceRows:
    """All that a source holds: usable rows in source order, and the others with their reasons."""

    shape: Shape
    rows: list[Row]
    rejected: list[Rejected]


@dataclass(frozen=True)
class _File:
    path: Path
    name: str
    split: Split | None


@dataclass(frozen=True)
class _Found:
    """One row as it stands in its file: a record, or why it is none."""

    file: _File
    line: int
    record: Record | None
    fault: str = ""
    text: str = ""


class _Unfit(ValueError):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def files(path: Path) -> list[Path]:
    """The files that make up the source at `path`, in reading order; `ConfigError` if it is none."""
    try:
        return [file.path for file in _files(path)]
    except OSError as error:
        raise _unreadable(path, error) from None


def read(path: Path) -> SourceRows:
    """Every row of the file or folder at `path`.

    Raises `ConfigError` if the format or the shape is not known, or if no row at all can be used.
    """
    try:
        listed = _files(path)
        if not any(file.path.stat().st_size for file in listed):
            raise ConfigError(f"{path} is empty.", hint="Give a file with at least two rows.")
        found = [row for file in listed for row in _READERS[file.path.suffix.lower()](file)]
    except OSError as error:
        raise _unreadable(path, error) from None
    if not found:
        raise ConfigError(f"{path} is empty: it holds no row.", hint="Give a file with at least two rows.")
    records = [row.record for row in found if row.record is not None]
    shape = _shape(records)
    if shape is None:
        raise _no_shape(path, listed, records, found)
    rows, rejected = [], []
    for row in found:
        try:
            if row.record is None:
                raise _Unfit("malformed", row.fault)
            rows.append(_row(shape, row.record, row.file, row.line))
        except _Unfit as unfit:
            text = row.text or _repr(dict(row.record or {}))
            rejected.append(Rejected(unfit.reason, _printable(str(unfit)), row.file.name, row.line, _printable(text)))
    if not rows:
        reasons = ", ".join(sorted({one.reason for one in rejected})) or "it is empty"
        detail = f" For example line {rejected[0].line}: {rejected[0].detail}." if rejected else ""
        raise ConfigError(f"{path} has no usable row: {reasons}.{detail}", hint=f"It was read as {shape}.")
    return SourceRows("pairs" if shape == "query/positive" else "chat", rows, rejected)


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be read: {error}.", hint="Check the file and your rights to it.")


def _files(path: Path) -> list[_File]:
    name = _printable(path.name)
    if path.is_file():
        if path.suffix.lower() not in _READERS or path.suffix.lower() == ".arrow":
            raise ConfigError(f"{path} has an unknown format {path.suffix!r}.", hint=f"Known: {_FORMATS}.")
        return [_File(path, name, None)]
    if not path.is_dir():
        raise ConfigError(f"There is no file or folder {path}.", hint=f"Looked up from {Path.cwd()}.")
    if (path / "dataset_dict.json").is_file():
        names = _saved_splits(path)
        return [
            _File(file, f"{name}/{file.name}", _side(name) if len(names) > 1 else None)
            for name in names
            for file in _arrow_files(path / name)
        ]
    if (path / "state.json").is_file():
        return [_File(file, file.name, None) for file in _arrow_files(path)]
    inside = sorted(
        file
        for file in path.iterdir()
        if file.suffix.lower() in _READERS and file.suffix.lower() != ".arrow" and file.is_file()
    )
    if not inside:
        raise ConfigError(f"The folder {path} holds no data file.", hint=f"Known: {_FORMATS}.")
    # `train.jsonl` beside `test.jsonl` says how to split; any other names are parts of one whole.
    sided = [bool(_SIDE.match(file.stem)) for file in inside]
    sides = {_side(file.stem) for file in inside} if all(sided) else set()
    return [_File(file, _printable(file.name), _side(file.stem) if len(sides) == 2 else None) for file in inside]


def _side(name: str) -> Split:
    match = _SIDE.match(name)
    if match is None:
        raise ConfigError(
            f"The split {name!r} is neither for training nor for testing.",
            hint="Save the dataset with splits whose names begin with train, test, validation or eval.",
        )
    return "train" if match.group(1).lower() == "train" else "test"


def _saved_splits(folder: Path) -> list[str]:
    """The splits of a DatasetDict saved by `datasets`."""
    path = folder / "dataset_dict.json"
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        content = None
    names = content.get("splits") if isinstance(content, dict) else None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{path} does not list the splits of a dataset.", hint="Save the dataset again with datasets.save_to_disk."
        )
    return names


def _arrow_files(folder: Path) -> list[Path]:
    """The files of a dataset saved by `datasets`: Arrow streams, listed in its state.json."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return [folder / Path(file["filename"]).name for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{folder} is not a dataset that datasets.save_to_disk wrote: {error}.", hint="Save it again."
        ) from None


def _read_jsonl(file: _File) -> Iterator[_Found]:
    with file.path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            text = line.decode("utf-8", "backslashreplace").strip()
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield _Found(file, number, None, f"not JSON: {error}", text)
                continue
            yield _found(file, number, record, text)


def _read_json(file: _File) -> Iterator[_Found]:
    try:
        content = json.loads(file.path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file.path} is not JSON: {error}.", hint="One object per line? Then name it .jsonl."
        ) from None
    if not isinstance(content, list):
        raise ConfigError(
            f"{file.path} holds {type(content).__name__}, not a list of rows.",
            hint="Write a list of objects, or one object per line into a .jsonl file.",
        )
    for number, record in enumerate(content, start=1):
        yield _found(file, number, record, "")


def _read_csv(file: _File) -> Iterator[_Found]:
    csv.field_size_limit(_CELL_CHARS)
    with file.path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        while True:
            try:
                record = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield _Found(file, reader.line_num, None, f"not CSV: {error}")
                continue
            if None in record:
                yield _Found(file, reader.line_num, None, "more fields than the header", _repr(record))
            else:
                yield _Found(file, reader.line_num, record)


def _read_parquet(file: _File) -> Iterator[_Found]:
    try:
        batches = pq.ParquetFile(file.path).iter_batches()
        yield from _from_batches(file, batches)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"{file.path} is not Parquet: {error}.", hint="Write the file again.") from None


def _read_arrow(file: _File) -> Iterator[_Found]:
    try:
        with pa.memory_map(str(file.path)) as source:
            yield from _from_batches(file, pa.ipc.open_stream(source))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"{file.path} is not an Arrow stream: {error}.", hint="Save the dataset again.") from None


def _from_batches(file: _File, batches: Iterable[Any]) -> Iterator[_Found]:
    number = 0
    for batch in batches:
        for record in batch.to_pylist():
            number += 1
            yield _Found(file, number, record)


def _found(file: _File, line: int, record: object, text: str) -> _Found:
    if isinstance(record, dict):
        return _Found(file, line, record, text=text)
    return _Found(file, line, None, f"{type(record).__name__}, not an object", text or _repr(record))


_READERS: dict[str, Callable[[_File], Iterator[_Found]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
_TEXTS = frozenset({".jsonl", ".ndjson", ".json", ".csv"})


def _shape(records: list[Record]) -> str | None:
    """The shape that most rows fit. None fits whole where values are missing everywhere: then columns decide."""
    fitting: Counter[str] = Counter()
    columns: set[str] = set()
    for record in records:
        columns.update(record)
        for shape, required in SHAPES.items():
            fitting[shape] += all(record.get(column) not in (None, "") for column in required)
    best = max(SHAPES, key=lambda shape: fitting[shape])
    if fitting[best]:
        return best
    return next((shape for shape, required in SHAPES.items() if columns >= set(required)), None)


def _no_shape(path: Path, listed: list[_File], records: list[Record], found: list[_Found]) -> ConfigError:
    for file in listed:
        if file.path.suffix.lower() in _TEXTS and not _is_text(file.path):
            return ConfigError(f"{file.path} is not UTF-8 text.", hint="Save it as UTF-8, or give it its own suffix.")
    if not records:
        first = found[0]
        return ConfigError(
            f"{path} has no usable row. For example line {first.line}: {_printable(first.fault)}.",
            hint="Write one JSON object per row.",
        )
    columns: dict[str, None] = {}
    for record in records[:_SAMPLED_ROWS]:
        columns.update(dict.fromkeys(record))
    return ConfigError(
        f"{path} has the columns {_printable(', '.join(map(str, columns)))}, which make no known shape.",
        hint=f"Name the columns as in one of: {'; '.join(SHAPES)}.",
    )


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(_PROBED_BYTES)
    # The end may cut a character in two, which an incremental decoder waits for.
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    return b"\0" not in start


def _printable(text: str) -> str:
    """The start of `text`, as it can be printed and stored whatever bytes it came from."""
    return text[:_QUOTED_CHARS].encode("utf-8", "backslashreplace").decode()[:_QUOTED_CHARS]


def _repr(value: object) -> str:
    try:
        return repr(value)
    except RecursionError:
        return f"{type(value).__name__} that is nested too deeply to show"


def _row(shape: str, record: Record, file: _File, line: int) -> Row:
    origin = Origin(file.name, line)
    given = record.get("group")
    if shape == "query/positive":
        query, positive = _text(record, "query"), _text(record, "positive")
        group = _group(given, [query])
        negatives = _negatives(record)
        identity = content_id([query, positive, *negatives])
        return Row(identity, group, origin, query=query, positive=positive, negatives=negatives, split=file.split)
    messages = _messages(shape, record)
    group = _group(given, asked(messages))
    return Row(content_id(messages), group, origin, messages=messages, split=file.split)


def _negatives(record: Record) -> tuple[str, ...]:
    """Of the columns `negatives` (a list) or `negative` (one text), which a pair may have."""
    given = record.get("negatives")
    if given is None or given == "":
        return (_text(record, "negative"),) if record.get("negative") else ()
    given = _json_if_text(given, "negatives")
    if not isinstance(given, list):
        raise _Unfit("malformed", f"'negatives' is {_named(given)}, not a list of texts")
    return tuple(_text({"negatives": one}, "negatives") for one in given)


def _group(given: object, question: object) -> str:
    """The row's own group, else one of its question's: several answers to one question stay on one side."""
    if given is None or given == "":
        return content_id(question)
    if isinstance(given, list | dict):
        raise _Unfit("malformed", f"'group' is {_named(given)}, not text or a number")
    return _encodable(str(given), "group")


def own_group(row: Row) -> str:
    """The group that `row` has where its source names none."""
    return content_id(asked(row.messages) if row.messages else [row.query])


def _messages(shape: str, record: Record) -> tuple[Message, ...]:
    if shape == "messages":
        turns = _turns(_json_if_text(record.get("messages")), "messages")
    elif shape == "prompt/completion":
        turns = [
            message
            for column, role in (("prompt", "user"), ("completion", "assistant"))
            for message in _turns_or_text(record, column, role)
        ]
    else:
        instruction, context = _text(record, "instruction"), record.get("input")
        question = f"{instruction}\n\n{_text(record, 'input')}" if context else instruction
        turns = [
            Message(role="user", content=question),
            Message(role="assistant", content=_text(record, "output")),
        ]
    roles = [turn["role"] for turn in turns]
    if roles[-1] != "assistant":
        raise _Unfit("no-answer", f"the last turn is by {roles[-1]!r}, not by the assistant")
    if "user" not in roles:
        raise _Unfit("no-question", "no turn is by the user")
    return tuple(turns)


def _turns_or_text(record: Record, column: str, role: str) -> list[Message]:
    value = record.get(column)
    if isinstance(value, list):
        return _turns(value, column)
    return [Message(role=role, content=_text(record, column))]


def _turns(value: object, column: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise _Unfit("missing-value", f"{column!r} is {_named(value)}, not a list of turns")
    turns = []
    for number, turn in enumerate(value):
        role = turn.get("role") if isinstance(turn, Mapping) else turn
        if not isinstance(turn, Mapping) or not isinstance(role, str) or role not in _ROLES:
            known = ", ".join(sorted(_ROLES))
            raise _Unfit("unknown-role", f"turn {number} has the role {_repr(role)[:50]}, not one of {known}")
        turns.append(Message(role=role, content=_text(turn, "content")))
    return turns


def _json_if_text(value: object, column: str = "messages") -> object:
    """CSV has no lists: there, `column` is JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise _Unfit("malformed", f"{column!r} is not JSON: {error}") from None


def _text(record: Record, column: str) -> str:
    value = record.get(column)
    if not isinstance(value, str) or not value.strip():
        raise _Unfit("missing-value", f"{column!r} is {_named(value)}, not text")
    return _encodable(value, column)


def _encodable(text: str, column: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _Unfit("not-utf8", f"{column!r} has characters that UTF-8 cannot hold") from None
    return text


def _named(value: object) -> str:
    if value is None:
        return "missing"
    return "empty" if isinstance(value, str | list) and not value else type(value).__name__
