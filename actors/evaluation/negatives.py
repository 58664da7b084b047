"""Hard negatives: documents that a model takes for an answer and that are none, mined from its own mistakes.

`chosen` is pure: vectors in, places out. `mine` embeds on Ray with the model it is given, searches exactly, and
publishes pairs with negatives as a data version. Mined again with what was trained on them, that is another round.
"""

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from actors.data import version
from actors.data.config import DataConfig, NegativesConfig
from actors.data.examples import SCHEMAS
from actors.data.prepare import limit_of
from actors.data.version import DataVersion, SplitContent
from actors.evaluation import embedding
from actors.evaluation.embedding import Dtype
from actors.evaluation.search import Vectors, nearest
from cluster.errors import ConfigError
from cluster.models import StoredModel
from cluster.progress import Progress, Sink, silent
from cluster.storage import Home

logger = logging.getLogger(__name__)

_QUERIES_AT_ONCE = 512


def chosen(
    config: NegativesConfig, queries: Vectors, documents: Vectors, right: Sequence[Sequence[int]]
) -> list[list[int]]:
    """For each of `queries` [Q, D] the places of its negatives among `documents` [N, D], the nearest first.

    `right` [Q] are the places of what answers a query, the positive of its row first. A document is no negative if it
    is one of them, if its similarity to the query comes within `margin` of the positive's (it may answer as well, and
    nobody said so: NV-Retriever's TopK-PercPos, arXiv:2407.15831), or if it is nearly the positive itself.
    """
    found: list[list[int]] = []
    for begin in range(0, len(queries), _QUERIES_AT_ONCE):
        block = queries[begin : begin + _QUERIES_AT_ONCE]
        for query, places, answers in zip(
            block, nearest(block, documents, config.candidates), right[begin : begin + len(block)], strict=True
        ):
            positive = documents[answers[0]]
            near = documents[places]
            similarity = float(query @ positive)
            kept = near @ query <= similarity - config.margin * abs(similarity)
            kept &= near @ positive <= config.most_alike
            kept &= ~np.isin(places, answers)
            found.append(places[kept][: config.per_query].tolist())
    return found


def mine(
    examples: DataVersion,
    config: DataConfig,
    model: StoredModel,
    home: Home,
    *,
    dtype: Dtype = "float32",
    sink: Sink = silent,
) -> DataVersion:
    """The pairs of `examples` with `config.negatives` of each query of the train side, by `model`. Needs Ray.

    What a source brought of its own stays, in front. If the same was mined before, that version is returned at once.
    Raises `ConfigError` if `examples` are no pairs, and what `embedding.embed` does.
    """
    assert config.negatives is not None
    if examples.stage != "examples" or examples.shape != "pairs":
        raise ConfigError(f"{examples.id} holds {examples.shape} ({examples.stage}); negatives are mined for pairs.")
    limits = {split: limit_of(config, examples, split) for split in version.SPLITS}
    settings = {
        "limits": limits,
        "negatives": config.negatives.model_dump(mode="json"),
        "max_length": config.max_length,
        "model": model.digest,
        "dtype": dtype,
    }
    name = f"{examples.name}.negatives"
    fingerprint = version.digest_of(name, examples.digest, settings)
    if (existing := version.find(home, name, fingerprint)) is not None:
        version.verify(existing, home)
        sink(Progress(stage="mine", done=1, total=1, unit="versions", note=f"{existing.id} exists already"))
        return existing
    version.verify(examples, home)
    tables = {split: version.head(examples.shards(split, home), limits[split]) for split in version.SPLITS}
    train = tables["train"].to_pylist()
    texts = list(dict.fromkeys(row["positive"] for row in train))
    place = {text: number for number, text in enumerate(texts)}
    answers: dict[str, list[int]] = {}
    for row in train:
        answers.setdefault(row["query"], []).append(place[row["positive"]])
    vectors = embedding.embed(
        model, [*(row["query"] for row in train), *texts], home, dtype=dtype, max_tokens=config.max_length, sink=sink
    )
    right = [[place[row["positive"]], *answers[row["query"]]] for row in train]
    places = chosen(config.negatives, vectors[: len(train)], vectors[len(train) :], right)
    mined = [
        [*(row.get("negatives") or ()), *(texts[one] for one in several)]
        for row, several in zip(train, places, strict=True)
    ]
    lacking = sum(not several for several in places)
    made = version.store(
        home,
        name=name,
        stage="examples",
        shape="pairs",
        parent=examples.id,
        contents={
            "train": _content(tables["train"], mined),
            "test": _content(tables["test"], [list(one or ()) for one in _negatives(tables["test"])]),
        },
        rejected=[],
        dropped={},
        config=settings,
        fingerprint=fingerprint,
    )
    logger.info("data version %s of %s; %d of %d queries got no negative", made.id, examples.id, lacking, len(train))
    note = f"{lacking} of {len(train)} queries got no negative" if lacking else ""
    sink(Progress(stage="mine", done=len(train), total=len(train), unit="queries", note=note))
    return made


def _negatives(table: pa.Table) -> list[list[str] | None]:
    return list(table["negatives"].to_pylist()) if "negatives" in table.column_names else [None] * table.num_rows


def _content(table: pa.Table, negatives: Sequence[Sequence[str]]) -> SplitContent:
    """The rows of `table` with `negatives` in place of its own."""
    columns: Mapping[str, pa.Array] = {
        field.name: pa.array([list(one) for one in negatives], field.type)
        if field.name == "negatives"
        else table[field.name]
        for field in SCHEMAS["pairs"]
    }
    ids, groups = table["id"].to_pylist(), table["group"].to_pylist()
    return SplitContent(
        table=pa.table(dict(columns), schema=SCHEMAS["pairs"]),
        digest=version.digest_of(ids, [list(one) for one in negatives]),
        groups=len(set(groups)),
    )
