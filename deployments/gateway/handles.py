"""The gateway's ports over Ray Serve handles. Ray's errors stop here (`deployments.calls`).

It knows which deployment method answers which port; it decides no status and no name.
"""

from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.errors import RequestError
from cluster.vectors.port import Scalar
from deployments.calls import call, translated
from deployments.gateway.ports import Vectors
from deployments.llm.protocol import Adapter, Answer, Generation

_HANDLES_KEPT = 256


class EngineHandle:
    """`ports.Engine` over the LLM deployment."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._base = handle.options(stream=True)
        self._plain = handle
        # A configured handle has its own router and long poll to the controller: made once per adapter.
        self._for_adapter: OrderedDict[str, DeploymentHandle] = OrderedDict()

    async def generate(self, generation: Generation) -> AsyncIterator[Answer]:
        answers = self._handle(generation.adapter).generate.remote(generation)
        try:
            async for answer in answers:
                if isinstance(answer, RequestError):
                    raise answer
                yield answer
        except (RayError, RayServeException) as error:
            raise translated(error, "the language model") from None
        finally:
            # Also when the client has hung up: the engine must not go on for nobody.
            answers.cancel()

    async def describe(self) -> dict[str, Any]:
        return dict(await call(self._plain.describe, part="the language model"))

    def _handle(self, adapter: Adapter | None) -> DeploymentHandle:
        if adapter is None:
            # No multiplexed id: base requests go to any replica, not to the one that has "the base" loaded.
            return self._base
        name = adapter.engine_name
        if name not in self._for_adapter:
            self._for_adapter[name] = self._base.options(multiplexed_model_id=name)
            if len(self._for_adapter) > _HANDLES_KEPT:
                self._for_adapter.popitem(last=False)
        self._for_adapter.move_to_end(name)
        return self._for_adapter[name]


class EmbedderHandle:
    """`ports.Embedder` over the embedding deployment."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def embed(self, texts: list[str] | list[list[int]]) -> Vectors:
        made: Vectors = await call(self._handle.embed, texts, part="the embedder")
        return made

    async def describe(self) -> dict[str, Any]:
        return dict(await call(self._handle.describe, part="the embedder"))


class CollectionsHandle:
    """`ports.Collections` over the search deployment."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def write(self, collection: str, documents: list[dict[str, Any]]) -> int:
        return int(await call(self._handle.write, collection, documents, part="the collections"))

    async def search(
        self, collection: str, query: str, k: int, filter: dict[str, Scalar] | None = None
    ) -> list[dict[str, Any]]:
        hits = await call(self._handle.search, collection, query, k, filter, part="the collections")
        return [dict(hit) for hit in hits]
