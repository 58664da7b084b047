"""The embedder of another deployment, reached through its Serve handle."""

from ray.serve.handle import DeploymentHandle

from deployments.calls import call
from deployments.embedding.port import Embedded, EmbedderInfo, Inputs

_PART = "the embedder"


class HandleEmbedder:
    """`Embedder` over a Serve handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def embed(self, texts: Inputs, *, truncate: bool = False) -> Embedded:
        embedded: Embedded = await call(self._handle.embed, texts, truncate=truncate, part=_PART)
        return embedded

    async def info(self) -> EmbedderInfo:
        info: EmbedderInfo = await call(self._handle.info, part=_PART)
        return info
