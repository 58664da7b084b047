"""From examples to a data version of the tokens stage: render, mask, tokenize, pack, publish.

The shell around `chat` and `packing`; the only one that knows which Ray tasks tokenize.
"""

import functools
import importlib.metadata
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from ray.data import TaskPoolStrategy
from ray.data.expressions import lit

from actors.data import chat, feed, packing, version
from actors.data.build import version_name
from actors.data.chat import RenderError
from actors.data.config import DataConfig, Split
from actors.data.packing import NO_LOSS, TokenizedExample
from actors.data.rows import Rejected, turns
from actors.data.version import DataVersion, SplitContent
from cluster.errors import ConfigError
from cluster.progress import Progress, Sink, silent
from cluster.storage import Home, digest_file

logger = logging.getLogger(__name__)

TRANSFORMERS = importlib.metadata.version("transformers")
"""Whose tokenizers made the tokens."""

_CODE = ("prepare.py", "chat.py", "packing.py", "rows.py")
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab*", "merges.txt", "*.model",
)  # fmt: skip
_BATCH_ROWS = 1000
_ROWS_PER_WORKER = 20_000
_MAX_WORKERS = 8
_TOKENIZED = pa.schema(
    [
        ("split", pa.string()),
        ("row", pa.int64()),
        ("id", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("file", pa.string()),
        ("line", pa.int32()),
        ("group", pa.string()),
    ]
)


def prepare(
    examples: DataVersion, config: DataConfig, tokenizer_path: Path, home: Home, sink: Sink = silent
) -> DataVersion:
    """The tokens of both sides of `examples`, for the tokenizer in `tokenizer_path`; needs Ray.

    A row has `input_ids`, `labels` (-100: no loss), `position_ids` (from 0 in each example), each
    list<int32>[max_length], and the `sample_ids` it was made of. The limits of `config` count examples.
    Examples that do not fit or cannot be masked are quarantined. If the same was prepared before, that version
    is returned at once. Raises `ConfigError` if there is no usable tokenizer or nothing is left to train on,
    `StateError` if a published file is no longer what it was.
    """
    if examples.stage != "examples" or examples.shape != "chat":
        raise ConfigError(
            f"{examples.id} holds {examples.shape} ({examples.stage}); only chat examples are made into tokens.",
            hint="Use a source with messages, prompt/completion or instruction/output; pairs are for contrastive.",
        )
    limits = {split: limit_of(config, examples, split) for split in version.SPLITS}
    settings: dict[str, Any] = {
        "max_length": config.max_length,
        "packing": config.packing,
        "seed": config.seed,
        "limits": limits,
        "tokenizer": tokenizer_digest(tokenizer_path),
        "transformers": TRANSFORMERS,
        "code": version.code_digest(_CODE),
    }
    name = f"{examples.name}.tokens"
    fingerprint = version.digest_of(name, examples.digest, settings)
    if (existing := version.find(home, name, fingerprint)) is not None:
        version.verify(existing, home)
        sink(Progress(stage="prepare", done=1, total=1, unit="versions", note=f"{existing.id} exists already"))
        return existing
    version.verify(examples, home)
    tokenizer = chat.load_tokenizer(tokenizer_path)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad_id is None:
        raise ConfigError(
            f"The tokenizer in {tokenizer_path} has neither a padding nor an end token.",
            hint="Set pad_token in its tokenizer_config.json.",
        )
    contents: dict[Split, SplitContent] = {}
    rejected: list[Rejected] = []
    for split, rows in tokenized(examples, home, limits, partial(_tokenize, tokenizer_path), sink).items():
        usable = []
        for one in rows:
            fault = _fault(one, config.max_length)
            if fault is None:
                usable.append(one)
            else:
                rejected.append(Rejected(*fault, one["file"], one["line"], one["id"]))
        contents[split] = _content(usable, config, pad_id)
    if not contents["train"].examples:
        reasons = ", ".join(sorted({one.reason for one in rejected})) or "there are none"
        raise ConfigError(
            f"No example of {examples.id} can be trained on: {reasons}.",
            hint="Raise data.max_length, or look at the examples with `flywheel data show`.",
        )
    prepared = version.store(
        home,
        name=name,
        stage="tokens",
        shape="chat",
        parent=examples.id,
        contents=contents,
        rejected=rejected,
        dropped={},
        config=settings,
        fingerprint=fingerprint,
    )
    logger.info("data version %s of %s", prepared.id, examples.id)
    return prepared


def limit_of(config: DataConfig, examples: DataVersion, split: Split) -> int | None:
    """How many examples of this side the recipe asks for; None is all."""
    for source in (config.train, config.eval):
        if source is not None and source.split == split and version_name(source.source) == examples.name:
            return source.limit
    return None


def tokenized(
    examples: DataVersion,
    home: Home,
    limits: Mapping[Split, int | None],
    tokenize: Callable[[pa.Table], pa.Table],
    sink: Sink,
) -> dict[Split, list[dict[str, Any]]]:
    """Every example of both sides in the version's row order, as `tokenize` gives it, which keeps `split` and `row`."""
    sides = [
        feed.dataset(examples, split, home, limit=limits[split]).with_column("split", lit(split))
        for split in version.SPLITS
    ]
    total = sum(min(side.rows, limits[split] or side.rows) for split, side in examples.splits.items())
    # A worker imports transformers for seconds: one is enough until tokenizing takes longer than that.
    workers = min(_MAX_WORKERS, 1 + total // _ROWS_PER_WORKER)
    stream = (
        sides[0]
        .union(*sides[1:])
        .map_batches(
            tokenize,
            batch_size=_BATCH_ROWS,
            batch_format="pyarrow",
            compute=TaskPoolStrategy(size=workers),
        )
    )
    found: list[dict[str, Any]] = []
    for batch in stream.iter_batches(batch_size=None, batch_format="pyarrow"):
        found += batch.to_pylist()
        sink(Progress(stage="prepare", done=len(found), total=total, unit="examples"))
    found.sort(key=lambda one: int(one["row"]))
    return {split: [one for one in found if one["split"] == split] for split in version.SPLITS}


def _tokenize(tokenizer_path: Path, batch: pa.Table) -> pa.Table:
    """One Ray task."""
    tokenizer = _loaded(tokenizer_path)
    tokenized = []
    for one in batch.to_pylist():
        reason, detail, rendered = "", "", chat.RenderedChat([], [])
        try:
            rendered = chat.render(tokenizer, turns(one["messages"]))
        except RenderError as error:
            reason, detail = error.reason, str(error)
        tokenized.append(
            {
                **{key: one[key] for key in ("split", "row", "id", "group")},
                **{key: one["origin"][key] for key in ("file", "line")},
                "input_ids": rendered.input_ids,
                "loss_mask": rendered.loss_mask,
                "reason": reason,
                "detail": detail,
            }
        )
    return pa.Table.from_pylist(tokenized, schema=_TOKENIZED)


@functools.cache
def _loaded(tokenizer_path: Path) -> Any:
    """Kept for the life of a Ray worker process, which runs many tasks."""
    return chat.load_tokenizer(tokenizer_path)


def _fault(one: dict[str, Any], max_length: int) -> tuple[str, str] | None:
    if one["reason"]:
        return one["reason"], one["detail"]
    length = len(one["input_ids"])
    if length > max_length:
        return "too-long", f"{length} tokens, max_length is {max_length}"
    if not any(one["loss_mask"][1:]):
        return "no-loss", "no token has loss"
    return None


def _content(usable: list[dict[str, Any]], config: DataConfig, pad_id: int) -> SplitContent:
    tokenized = [TokenizedExample(one["id"], one["input_ids"], one["loss_mask"]) for one in usable]
    sequences = [
        packing.collate([tokenized[member] for member in members], config.max_length, pad_id)
        for members in packing.arrange(tokenized, config.max_length, packing=config.packing, seed=config.seed)
    ]
    columns = {
        key: np.stack([getattr(sequence, key) for sequence in sequences])
        if sequences
        else np.empty((0, config.max_length), dtype=np.int32)
        for key in ("input_ids", "labels", "position_ids")
    }
    sample_ids = [sequence.sample_ids for sequence in sequences]
    table = pa.table(
        {
            **{key: fixed_lists(values) for key, values in columns.items()},
            "sample_ids": pa.array(sample_ids, type=pa.list_(pa.string())),
            "row": pa.array(range(len(sequences)), type=pa.int64()),
        }
    )
    return SplitContent(
        table=table,
        digest=version.digest_of({key: values.tobytes().hex() for key, values in columns.items()}, sample_ids),
        groups=len({one["group"] for one in usable}),
        examples=len(usable),
        tokens=sum(len(one["input_ids"]) for one in usable),
        loss_tokens=int((columns["labels"] != NO_LOSS).sum()),
    )


def fixed_lists(values: packing.Ints) -> pa.Array:
    """The rows of `values` [R, T] as lists."""
    offsets = np.arange(0, values.size + 1, values.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.reshape(-1)))


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 over the files that decide how text becomes tokens; weights are none of them."""
    files = sorted({path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()})
    return version.digest_of([[path.name, digest_file(path)] for path in files])
