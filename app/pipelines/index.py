"""`flywheel index` and the demo's retrieval figures: documents in through the gateway, questions after them."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from time import monotonic
from urllib.parse import quote

import httpx

from actors.data.config import Split
from actors.data.examples import PairExample, read
from actors.data.version import DataVersion
from actors.evaluation.ranking import Scores, measure, summarize
from app.pipelines.gateway import connect, post
from cluster.errors import ConfigError
from cluster.progress import Progress, Sink
from cluster.storage import Home

_DOCUMENTS_PER_REQUEST = 64
_CLIENTS = 4


@dataclass(frozen=True)
class Indexed:
    """What an indexing run wrote."""

    collection: str
    documents: int
    seconds: float


def pool(
    version: DataVersion, home: Home, *, documents: int, splits: Sequence[Split] = ("train", "test")
) -> list[PairExample]:
    """The first `documents` pairs of the sides named, side after side; `ConfigError` if there are none."""
    pairs: list[PairExample] = []
    for split in splits:
        if split in version.splits:
            rows = read(version, split, home, limit=documents - len(pairs))
            pairs += [row for row in rows if isinstance(row, PairExample)]
    if not pairs:
        raise ConfigError(
            f"{version.id} has no query/positive pairs in {' or '.join(splits)}.",
            hint="Name a dataset of pairs, such as python-functions.",
        )
    return pairs


def index(
    url: str, collection: str, documents: Sequence[PairExample], sink: Sink, *, key: str | None = None
) -> Indexed:
    """Write the functions of `documents` into a collection; returns when every one is durable and can be found."""
    began = monotonic()
    done = 0
    with connect(url, key, timeout_s=600) as client, ThreadPoolExecutor(_CLIENTS) as pool:
        batches = [
            [{"id": pair.id, "text": pair.positive, "metadata": {"group": pair.group}} for pair in batch]
            for batch in _batched(documents, _DOCUMENTS_PER_REQUEST)
        ]
        for count in pool.map(lambda batch: _write(client, collection, batch), batches):
            done += count
            rate = done / (monotonic() - began)
            sink(Progress("index", done, len(documents), "documents", rate, "documents/s"))
    return Indexed(collection, done, monotonic() - began)


def ask(
    url: str,
    collection: str,
    queries: Sequence[PairExample],
    sink: Sink,
    *,
    k: int = 10,
    key: str | None = None,
    confidence: float = 0.95,
) -> Scores:
    """Search with each query; the right answer is the function its docstring was taken from.

    `recall@1`, `recall@k`, `mrr` and more, with intervals over packages: functions of one package are alike.
    """
    found: dict[str, list[str]] = {}
    with connect(url, key, timeout_s=120) as client, ThreadPoolExecutor(_CLIENTS) as pool:
        hits = pool.map(lambda pair: _search(client, collection, pair.query, k), queries)
        for pair, ids in zip(queries, hits, strict=True):
            found[pair.id] = ids
            sink(Progress("search", len(found), len(queries), "queries"))
    measured = measure(found, {pair.id: {pair.id: 1} for pair in queries}, ks=(1, k))
    return summarize(measured, confidence=confidence, groups={pair.id: pair.group for pair in queries})


def _write(client: httpx.Client, collection: str, batch: list[dict[str, object]]) -> int:
    response = post(client, f"/v1/collections/{quote(collection, safe='')}/documents", {"documents": batch})
    return int(response["written"])


def _search(client: httpx.Client, collection: str, query: str, k: int) -> list[str]:
    """Ids of the first k hits, best first."""
    hits = post(client, f"/v1/collections/{quote(collection, safe='')}/search", {"query": query, "k": k})["data"]
    return [hit["id"] for hit in hits]


def _batched(rows: Sequence[PairExample], size: int) -> Iterator[list[PairExample]]:
    iterator = iter(rows)
    while batch := list(islice(iterator, size)):
        yield batch
