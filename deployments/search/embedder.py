"""The embedder of another deployment, reached through its Serve handle. Ray's errors stop here."""

import asyncio
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.errors import CapacityError, DependencyError, FlywheelError
from deployments.embedding.port import Embedded, EmbedderInfo, Inputs

REPLACED_AFTER_S = 20.0


class HandleEmbedder:
    """`Embedder` over a Serve handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def embed(self, texts: Inputs, *, truncate: bool = False) -> Embedded:
        embedded: Embedded = await _answer(self._handle.embed.remote(texts, truncate=truncate))
        return embedded

    async def info(self) -> EmbedderInfo:
        info: EmbedderInfo = await _answer(self._handle.info.remote())
        return info


async def _answer(response: Any) -> Any:
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise
    except RayTaskError as error:
        # Ray raises a class made of RayTaskError and ours: it has our class attributes, but not our facts.
        raise (error.cause if isinstance(error.cause, FlywheelError) else error) from None
    except BackPressureError:
        raise CapacityError("Too many calls wait for the embedder.") from None
    except (RayActorError, DeploymentUnavailableError):
        raise CapacityError(
            "A replica of the embedder died; it is being replaced.", retry_after_s=REPLACED_AFTER_S
        ) from None
    except (RayError, RayServeException) as error:
        raise DependencyError(f"The embedder cannot be reached: {type(error).__name__}.") from None
