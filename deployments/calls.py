"""Calls from one deployment to another: Ray's errors stop here and become `cluster.errors`."""

import asyncio
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from cluster.errors import CapacityError, DependencyError, FlywheelError

RESTART_RETRY_AFTER_S = 30.0


async def call(method: Any, *arguments: Any, part: str, **options: Any) -> Any:
    """Await one method of another deployment; `part` names it to a person.

    A caller that is cancelled cancels the call, so that nobody computes for nobody.
    """
    response = method.remote(*arguments, **options)
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise
    except (RayError, RayServeException) as error:
        raise translated(error, part) from None


def translated(error: BaseException, part: str) -> BaseException:
    """Ray's error as ours. An error that a deployment raised comes back as it was raised."""
    if isinstance(error, RayTaskError):
        # Ray hands over a class made of RayTaskError and the original; the original is plainer.
        cause = error.cause
        return cause if isinstance(cause, FlywheelError) else error
    if isinstance(error, BackPressureError):
        return CapacityError(f"Too many requests wait for {part}.", retry_after_s=1.0)
    if isinstance(error, RayActorError | DeploymentUnavailableError):
        return CapacityError(f"A replica of {part} died. It is being replaced.", retry_after_s=RESTART_RETRY_AFTER_S)
    return DependencyError(f"Ray could not reach {part}: {type(error).__name__}.")
