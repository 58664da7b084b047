"""From pairs to a data version of the tokens stage: tokenize, number the texts, pack each pair into a row, publish.

A row is one sequence: the query, its positive, its negatives, each with the special tokens that the embedder reads.
`position_ids` start again at 0 with each text. `labels` hold the number of the text that a token belongs to: equal
texts have one number in the whole version, so that whoever contrasts rows knows what is the same. So rows of pairs
have the columns of all other training rows, and the feed, the accounts and the audit treat them alike.

A text is read up to `max_length` tokens, or up to what the embedder reads if that is less, as it will be served.
"""

import functools
import json
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from actors.data import prepare, version
from actors.data.config import DataConfig, Split
from actors.data.packing import NO_LOSS
from actors.data.rows import Rejected
from actors.data.version import DataVersion, SplitContent
from cluster.errors import ConfigError
from cluster.progress import Progress, Sink, silent
from cluster.storage import Home

logger = logging.getLogger(__name__)

_CODE = ("pairs.py", "prepare.py", "rows.py")
_TOKENIZED = pa.schema(
    [
        ("split", pa.string()),
        ("row", pa.int64()),
        ("id", pa.string()),
        ("texts", pa.list_(pa.string())),
        ("token_ids", pa.list_(pa.list_(pa.int32()))),
        ("file", pa.string()),
        ("line", pa.int32()),
        ("group", pa.string()),
    ]
)


def prepare_pairs(
    examples: DataVersion,
    config: DataConfig,
    embedder: Path,
    home: Home,
    sink: Sink = silent,
    *,
    needs_negatives: bool = False,
) -> DataVersion:
    """The rows of both sides of `examples`, for the sentence-transformers model in `embedder`; needs Ray.

    Columns are those of `prepare.prepare`. Negatives that are a positive of the query, or the query, go and are counted
    as dropped; with `needs_negatives` a row that has none then is quarantined. If the same was prepared before, that
    version is returned at once. Raises `ConfigError` if these are no pairs or nothing is left to train on,
    `StateError` if a published file is no longer what it was.
    """
    if examples.stage != "examples" or examples.shape != "pairs":
        raise ConfigError(
            f"{examples.id} holds {examples.shape} ({examples.stage}); objective contrastive learns from pairs.",
            hint="Use a source with query and positive (and negative or negatives), or objective sft.",
        )
    limits = {split: prepare.limit_of(config, examples, split) for split in version.SPLITS}
    limit = min(config.max_length, _reads(embedder) or config.max_length)
    settings: dict[str, Any] = {
        "max_length": limit,
        "limits": limits,
        "prompt": prompt_of(embedder),
        "needs_negatives": needs_negatives,
        "tokenizer": prepare.tokenizer_digest(embedder),
        "transformers": prepare.TRANSFORMERS,
        "code": version.code_digest(_CODE),
    }
    name = f"{examples.name}.pairs"
    fingerprint = version.digest_of(name, examples.digest, settings)
    if (existing := version.find(home, name, fingerprint)) is not None:
        version.verify(existing, home)
        sink(Progress(stage="prepare", done=1, total=1, unit="versions", note=f"{existing.id} exists already"))
        return existing
    version.verify(examples, home)
    read = partial(_tokenize, embedder, settings["prompt"], limit)
    sides = prepare.tokenized(examples, home, limits, read, sink)
    dropped = 0
    rejected: list[Rejected] = []
    usable: dict[Split, list[dict[str, Any]]] = {}
    for split, rows in sides.items():
        dropped += drop_false_negatives(rows)
        lacking = [row for row in rows if needs_negatives and len(row["texts"]) < 3]
        rejected += [
            Rejected("no-negative", "loss triplet needs one", row["file"], row["line"], row["id"]) for row in lacking
        ]
        usable[split] = [row for row in rows if not needs_negatives or len(row["texts"]) > 2]
    if not usable["train"]:
        raise ConfigError(
            f"No pair of {examples.id} can be trained on: {'no row has a negative' if rejected else 'there are none'}.",
            hint="Use objective.loss multiple_negatives, which needs none."
            if rejected
            else "Give the source more rows.",
        )
    numbers: dict[str, int] = {}
    prepared = version.store(
        home,
        name=name,
        stage="tokens",
        shape="pairs",
        parent=examples.id,
        contents={split: content(usable[split], numbers) for split in version.SPLITS},
        rejected=rejected,
        dropped={"negative-is-positive": dropped} if dropped else {},
        config=settings,
        fingerprint=fingerprint,
    )
    logger.info("data version %s of %s", prepared.id, examples.id)
    return prepared


def prompt_of(embedder: Path) -> str:
    """What the model in `embedder` reads before every text, by default."""
    settings = _settings(embedder, "config_sentence_transformers.json")
    return str((settings.get("prompts") or {}).get(settings.get("default_prompt_name")) or "")


def drop_false_negatives(rows: Sequence[dict[str, Any]]) -> int:
    """Take out of `rows`, in place, negatives that are the query or a positive of it in any row; how many went."""
    positives: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        query, positive, *_ = row["texts"]
        positives[query] |= {query, positive}
    gone = 0
    for row in rows:
        query, _, *negatives = row["texts"]
        kept = [0, 1, *(place for place, text in enumerate(negatives, 2) if text not in positives[query])]
        gone += len(row["texts"]) - len(kept)
        row["texts"] = [row["texts"][place] for place in kept]
        row["token_ids"] = [row["token_ids"][place] for place in kept]
    return gone


def content(rows: Sequence[Mapping[str, Any]], numbers: dict[str, int]) -> SplitContent:
    """`rows` (`texts` and their `token_ids`) as the content of a side; `numbers` of texts are added to."""
    width = max((sum(map(len, row["token_ids"])) for row in rows), default=1)
    columns = {name: np.zeros((len(rows), width), np.int32) for name in ("input_ids", "labels", "position_ids")}
    columns["labels"] += NO_LOSS
    for place, row in enumerate(rows):
        begin = 0
        for text, token_ids in zip(row["texts"], row["token_ids"], strict=True):
            part = slice(begin, begin + len(token_ids))
            columns["input_ids"][place, part] = token_ids
            columns["labels"][place, part] = numbers.setdefault(text, len(numbers))
            columns["position_ids"][place, part] = np.arange(len(token_ids))
            begin = part.stop
    ids = [[row["id"]] for row in rows]
    table = pa.table(
        {
            **{name: prepare.fixed_lists(values) for name, values in columns.items()},
            "sample_ids": pa.array(ids, type=pa.list_(pa.string())),
            "row": pa.array(range(len(rows)), type=pa.int64()),
        }
    )
    return SplitContent(
        table=table,
        digest=version.digest_of({name: values.tobytes().hex() for name, values in columns.items()}, ids),
        groups=len({row["group"] for row in rows}),
        examples=len(rows),
        tokens=sum(len(token_ids) for row in rows for token_ids in row["token_ids"]),
        loss_tokens=len(rows),
    )


def _tokenize(embedder: Path, prompt: str, limit: int, batch: pa.Table) -> pa.Table:
    """One Ray task."""
    tokenizer = _loaded(embedder)
    tokenized = []
    for one in batch.to_pylist():
        texts = [one["query"], one["positive"], *(one.get("negatives") or ())]
        read = tokenizer([prompt + text for text in texts], truncation=True, max_length=limit)
        tokenized.append(
            {
                **{key: one[key] for key in ("split", "row", "id", "group")},
                **{key: one["origin"][key] for key in ("file", "line")},
                "texts": texts,
                "token_ids": read["input_ids"],
            }
        )
    return pa.Table.from_pylist(tokenized, schema=_TOKENIZED)


@functools.cache
def _loaded(embedder: Path) -> Any:
    """Kept for the life of a Ray worker process, which runs many tasks."""
    from transformers import AutoTokenizer  # heavy: seconds

    try:
        return AutoTokenizer.from_pretrained(embedder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"There is no usable tokenizer in {embedder}: {str(error).splitlines()[0]}",
            hint="Give the folder of a model with tokenizer.json.",
        ) from None


def _reads(embedder: Path) -> int | None:
    """Tokens that the model in `embedder` reads of a text, where it says so."""
    longest = _settings(embedder, "sentence_bert_config.json").get("max_seq_length")
    return longest if isinstance(longest, int) else None


def _settings(embedder: Path, file: str) -> dict[str, Any]:
    path = embedder / file
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {type(error).__name__}.", hint="Save the model with save_pretrained()."
        ) from None
