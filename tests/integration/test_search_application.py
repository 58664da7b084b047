"""Search over Serve with real parts: handle → embedder → Milvus Lite, and what callers see of failures."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray
from ray import serve
from ray.exceptions import RayTaskError

from cluster.errors import RequestError
from cluster.storage import Home
from cluster.vectors import lite_server
from deployments.embedding.config import EmbeddingConfig
from deployments.embedding.server import build as build_embedding
from deployments.search.config import SearchConfig
from deployments.search.server import build as build_search
from tests.serving import ServeApp

pytestmark = pytest.mark.serve

APPLICATION = "search-test"
DOCUMENTS = [
    {
        "id": "chunks",
        "text": "def chunks(file, size):\n    while part := file.read(size):\n        yield part",
    },
    {
        "id": "median",
        "text": "def median(numbers):\n    return sorted(numbers)[len(numbers) // 2]",
    },
    {"id": "fetch", "text": "def fetch(url):\n    with urlopen(url) as response:\n        return response.read()"},
]


@pytest.fixture(scope="module")
def search(serve_app: ServeApp) -> Iterator[Any]:
    embedding = build_embedding(EmbeddingConfig(model="all-minilm-l6-v2"))
    handle = serve.run(build_search(SearchConfig(), [embedding]), name=APPLICATION, route_prefix=None)
    yield handle
    handle.drop.remote("functions").result(timeout_s=60)
    serve.delete(APPLICATION)


def test_documents_are_found_by_meaning(search: Any) -> None:
    assert search.write.remote("functions", DOCUMENTS).result(timeout_s=60) == 3
    for query, expected in (
        ("read a file piece by piece", "chunks"),
        ("the middle value of a list", "median"),
        ("download a web page", "fetch"),
    ):
        hits = search.search.remote("functions", query, 2).result(timeout_s=60)
        assert [hits[0]["id"], len(hits)] == [expected, 2]
        assert hits[0]["score"] > hits[1]["score"]


def test_errors_keep_their_facts_across_two_handles(search: Any) -> None:
    with pytest.raises(RayTaskError) as caught:
        search.write.remote("functions", [{"text": "word " * 400}]).result(timeout_s=60)
    cause = caught.value.cause
    assert isinstance(cause, RequestError)
    assert (cause.status, cause.code, cause.param) == (400, "context_length_exceeded", "documents[0].text")


def test_a_store_that_dies_is_back_for_the_next_call(search: Any, home: Home) -> None:
    search.write.remote("functions", DOCUMENTS).result(timeout_s=60)
    server = ray.get(lite_server(home).pid.remote())
    os.kill(server, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(server)] if psutil.pid_exists(server) else [], timeout=5)
    hits = search.search.remote("functions", "download a web page", 1).result(timeout_s=60)
    assert hits[0]["id"] == "fetch"
    assert search.describe.remote("functions").result(timeout_s=60)["documents"] == 3
