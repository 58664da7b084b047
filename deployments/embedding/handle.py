"""The embedder of another deployment, reached through its Serve handle."""

from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.calls import call
from deployments.embedding.port import Embedded, EmbedderInfo, Inputs, InputType


class HandleEmbedder:
    """`Embedder` over a Serve handle; `part` is what a person calls it."""

    def __init__(self, handle: DeploymentHandle, *, part: str = "the embedder") -> None:
        self._handle = handle
        self._part = part

    async def embed(
        self,
        texts: Inputs,
        *,
        input_type: InputType | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> Embedded:
        embedded: Embedded = await call(
            self._handle.embed,
            texts,
            input_type=input_type,
            dimensions=dimensions,
            truncate=truncate,
            part=self._part,
        )
        return embedded

    async def info(self) -> EmbedderInfo:
        info: EmbedderInfo = await call(self._handle.info, part=self._part)
        return info

    async def describe(self) -> dict[str, Any]:
        return dict(await call(self._handle.describe, part=self._part))
