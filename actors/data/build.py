"""From a source to a data version of the examples stage: read or mine, choose, split, publish.

The shell around `mining`, `sources` and `split`; the only one that knows which Ray tasks do the mining.
"""

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray.data

from actors.data import examples, installed, mining, sources, split, version
from actors.data.config import DataConfig, Split
from actors.data.installed import SourceFile
from actors.data.mining import MINERS, Finding, UnreadableSource
from actors.data.rows import Message, Origin, Rejected, Row, Shape, content_id, rank
from actors.data.version import DataVersion
from cluster.config import nearest
from cluster.errors import ConfigError
from cluster.progress import Progress, Sink, silent
from cluster.storage import Home, digest_file

logger = logging.getLogger(__name__)

TASK = "Name the Python exception."
"""System message of every `python-errors` example. Short, because its tokens are paid for in each; and there at
all, because without one SmolLM2's template puts in a longer one of its own."""

_CODE = ("build.py", "examples.py", "installed.py", "mining.py", "rows.py", "sources.py", "split.py")
_FILES_PER_TASK = 500
_NAME_CHARS = 100  # leaves room for what is added to a name: 128 is the most
_FOUND = pa.schema(
    [
        ("file", pa.int32()),
        ("line", pa.int32()),
        ("text", pa.string()),
        ("answer", pa.string()),
        ("fault", pa.string()),
    ]
)
"""What a mining task gives back: findings, and files that could not be read with `fault`."""


@dataclass(frozen=True)
class _Gathered:
    """All usable rows of a source in an order that does not depend on how they were read."""

    shape: Shape
    rows: list[Row]
    rejected: list[Rejected]
    dropped: Mapping[str, int]
    class_share: float | None = None


def build(name_or_path: str, config: DataConfig, home: Home, sink: Sink = silent) -> DataVersion:
    """The examples of a mined dataset or of a user's file or folder, split and published; needs Ray.

    If a version was made of the same inputs (files, settings, code) before, that version is returned at once.
    Mined files count as the same while their names, sizes and modification times are.
    Raises `ConfigError` for a source that does not exist or cannot be used.
    """
    if not name_or_path.strip():
        raise ConfigError("The source is empty.", hint="Give a mined dataset, or the path of a file or folder.")
    name = version_name(name_or_path)
    settings = {
        "source": name_or_path if name_or_path in MINERS else Path(name_or_path).name,
        "test_fraction": config.test_fraction,
        "near_duplicate_similarity": config.near_duplicate_similarity,
        "seed": config.seed,
        "code": version.code_digest(_CODE),
    }
    if name_or_path in MINERS:
        found = installed.installed_files()
        inputs = [[one.name, one.group, one.version, one.size_bytes, one.modified_ns] for one in found]
    else:
        path = _existing(name_or_path)
        try:
            inputs = [[file.name, digest_file(file)] for file in sources.files(path)]
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read: {error}.", hint="Check the files and your rights to them."
            ) from None
    fingerprint = version.digest_of(name, settings, inputs)
    if (existing := version.find(home, name, fingerprint)) is not None:
        sink(Progress(stage="data", done=1, total=1, unit="versions", note=f"{existing.id} exists already"))
        return existing
    if name_or_path in MINERS:
        gathered = _mined(name_or_path, found, config.seed, sink)
    else:
        read = sources.read(path)
        gathered = _Gathered(read.shape, read.rows, read.rejected, {})
    sides, dropped = _divided(gathered, config)
    built = version.store(
        home,
        name=name,
        stage="examples",
        shape=gathered.shape,
        parent=None,
        contents={side: examples.content(gathered.shape, rows) for side, rows in sides.items()},
        rejected=gathered.rejected,
        dropped=dropped,
        config=settings,
        fingerprint=fingerprint,
    )
    logger.info("data version %s: %s", built.id, {side: part.rows for side, part in built.splits.items()})
    return built


def version_name(source: str) -> str:
    """The name of the versions of a source: a mined dataset's own, or the file's or folder's without its suffix."""
    if source in MINERS:
        return source
    try:
        stem = _expanded(source).resolve().stem
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source!r} cannot be a path: {error}.", hint="Give the path of a file or folder.") from None
    name = "".join(sign if sign.isascii() and (sign.isalnum() or sign in "._-") else "-" for sign in stem)
    name = re.sub(r"\.{2,}", ".", name).strip(".-") or "data"
    if len(name) > _NAME_CHARS:
        name = f"{name[:_NAME_CHARS].strip('.-')}-{content_id(name)[:8]}"
    # A user's file must not pass for a mined dataset.
    return f"{name}-file" if name in MINERS else name


def _expanded(source: str) -> Path:
    try:
        return Path(source).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{source!r} cannot be a path: {error}", hint="Write the folder out instead of `~`."
        ) from None


def _existing(source: str) -> Path:
    path = _expanded(source)
    try:
        if path.exists():
            path.name.encode()  # the manifest names it
            return path
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{source!r} cannot be looked up: {error}.", hint="Give the path of a file or folder."
        ) from None
    meant = nearest(source, MINERS)
    raise ConfigError(
        f"There is no dataset, file or folder {source!r}.",
        hint=(f"Did you mean {meant!r}? " if meant else "")
        + f"Mined datasets: {', '.join(MINERS)}; a path is looked up from {Path.cwd()}.",
    )


def _divided(gathered: _Gathered, config: DataConfig) -> tuple[dict[Split, list[Row]], dict[str, int]]:
    free = [row for row in gathered.rows if row.split is None]
    if len(free) > 1 and len({row.group for row in free}) == 1 and free[0].group == sources.own_group(free[0]):
        raise ConfigError(
            f"All {len(free)} usable rows ask the same question, so none can be held out.",
            hint="Add rows that ask something else: rows with one question stay on one side.",
        )
    division = split.divide(
        [split.Item(row.id, row.group, row.compared_text, row.split) for row in gathered.rows],
        test_fraction=config.test_fraction,
        similarity=config.near_duplicate_similarity,
        seed=config.seed,
    )
    dropped = Counter({**gathered.dropped, **division.dropped})
    sides: dict[Split, list[Row]] = {}
    for side, positions in (("train", division.train), ("test", division.test)):
        chosen = [gathered.rows[position] for position in positions]
        if gathered.class_share is not None:
            kept = mining.balanced(
                [row.messages[-1]["content"] for row in chosen],
                gathered.class_share,
                [_chance_to_stay(config.seed, row) for row in chosen],
            )
            dropped["over-class-share"] += len(chosen) - len(kept)
            chosen = [chosen[place] for place in kept]
        sides["train" if side == "train" else "test"] = chosen
    return sides, {rule: count for rule, count in dropped.items() if count}


def _mined(name: str, files: Sequence[SourceFile], seed: int, sink: Sink) -> _Gathered:
    found, rejected = _search(name, files, sink)
    made = [_row(name, files[file], finding) for file, finding in found]
    miner = MINERS[name]
    selection = miner.select(
        [finding for _, finding in found],
        [files[file].group for file, _ in found],
        [_chance_to_stay(seed, row) for row in made],
    )
    return _Gathered(
        shape=miner.shape,
        rows=[made[position] for position in selection.kept],
        rejected=rejected,
        dropped=selection.dropped,
        class_share=miner.class_share,
    )


def _chance_to_stay(seed: int, row: Row) -> str:
    """Rank of a row where a cap cuts; independent of `rank(seed, id)`, by which rows are published."""
    return rank(seed, f"keep:{row.id}")


def _search(name: str, files: Sequence[SourceFile], sink: Sink) -> tuple[list[tuple[int, Finding]], list[Rejected]]:
    """Mine `files` in Ray tasks; results in the order of files and lines, whichever task ends first."""
    # Neighbours are alike (one package's generated code): an order by hash makes the tasks equally long.
    order = sorted(range(len(files)), key=lambda number: rank(0, files[number].name))
    tasks = max(1, len(files) // _FILES_PER_TASK)
    work = ray.data.from_items(
        [{"file": number, "path": files[number].path} for number in order], override_num_blocks=tasks
    )
    searched = work.map_batches(partial(_search_files, name), batch_size=None, batch_format="pyarrow")
    found: list[tuple[int, Finding]] = []
    rejected: list[Rejected] = []
    for done, batch in enumerate(searched.iter_batches(batch_size=None, batch_format="pyarrow"), start=1):
        for row in batch.to_pylist():
            if row["fault"]:
                rejected.append(Rejected("unreadable-file", row["fault"], files[row["file"]].name, 0))
            else:
                found.append((row["file"], Finding(row["line"], row["text"], row["answer"])))
        seen = min(len(files), round(len(files) * done / tasks))
        sink(Progress(stage="data", done=seen, total=len(files), unit="files", note=f"{name}: {len(found)} found"))
    found.sort(key=lambda one: (one[0], one[1].line, one[1].text))
    return found, sorted(rejected, key=lambda one: one.file)


def _search_files(name: str, batch: pa.Table) -> pa.Table:
    """One Ray task: the findings of many files, so that starting tasks costs little beside parsing."""
    found: list[dict[str, Any]] = []
    for number, path in zip(batch["file"].to_pylist(), batch["path"].to_pylist(), strict=True):
        try:
            for one in MINERS[name].find(Path(path).read_bytes()):
                found.append({"file": number, "line": one.line, "text": one.text, "answer": one.answer, "fault": ""})
        except (UnreadableSource, OSError) as error:
            found.append({"file": number, "line": 0, "text": "", "answer": "", "fault": str(error)})
    return pa.Table.from_pylist(found, schema=_FOUND)


def _row(name: str, file: SourceFile, finding: Finding) -> Row:
    origin = Origin(file.name, finding.line, file.package, file.version)
    if MINERS[name].shape == "pairs":
        pair = [finding.text, finding.answer]
        return Row(content_id(pair), file.group, origin, query=finding.text, positive=finding.answer)
    messages = (
        Message(role="system", content=TASK),
        Message(role="user", content=finding.text),
        Message(role="assistant", content=finding.answer),
    )
    return Row(content_id(messages), file.group, origin, messages=messages)
