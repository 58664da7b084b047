"""The reranker of another deployment, reached through its Serve handle."""

from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.calls import call
from deployments.reranking.port import Scored


class HandleReranker:
    """`Reranker` over a Serve handle; `part` is what a person calls it."""

    def __init__(self, handle: DeploymentHandle, *, part: str = "the reranker") -> None:
        self._handle = handle
        self._part = part

    async def rerank(self, query: str, documents: list[str], *, truncate: bool = False) -> Scored:
        scored: Scored = await call(self._handle.rerank, query, documents, truncate=truncate, part=self._part)
        return scored

    async def describe(self) -> dict[str, Any]:
        return dict(await call(self._handle.describe, part=self._part))
