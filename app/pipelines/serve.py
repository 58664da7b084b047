"""`flywheel serve`: bring the Serve application up, and down again."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from actors.registry.client import RegistryClient
from ray import serve
from tenacity import (
    RetryError,
    Retrying,
    retry_if_exception_type,
    retry_if_result,
    stop_after_delay,
    wait_fixed,
)

from cluster.errors import DependencyError
from cluster.progress import Progress, Sink
from cluster.session import require_free_port
from cluster.storage import Home
from deployments.application import build
from deployments.config import ServeConfig

_READY_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Served:
    """A running application."""

    url: str


def deploy(config: ServeConfig, home: Home, sink: Sink) -> Served:
    """Start the application on the connected Ray and wait until it answers. It stays when we return."""
    gateway = config.gateway
    url = f"http://{gateway.host}:{gateway.port}"
    if not _serve_is_running():
        require_free_port(gateway.host, gateway.port)
    sink(Progress("serve", 0, 2, "parts", note="registry"))
    RegistryClient.start(home)
    sink(Progress("serve", 1, 2, "parts", note="engine, embedder, gateway"))
    serve.start(
        http_options={"host": gateway.host, "port": gateway.port},
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    try:
        serve.run(build(config), name=config.name, route_prefix="/")
    except RuntimeError as error:
        raise DependencyError(
            f"The application did not start: {_cause(error)}",
            hint="`ray logs` and the dashboard's Serve page have the replica's log.",
            retryable=False,
        ) from None
    _wait_until_healthy(url)
    sink(Progress("serve", 2, 2, "parts", note=url))
    return Served(url)


@contextmanager
def running(config: ServeConfig, home: Home, sink: Sink) -> Iterator[Served]:
    """The application for as long as the block runs."""
    try:
        yield deploy(config, home, sink)
    finally:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.shutdown()


def _serve_is_running() -> bool:
    return bool(serve.status().proxies)


def _wait_until_healthy(url: str) -> None:
    wait = Retrying(
        stop=stop_after_delay(_READY_TIMEOUT_S),
        wait=wait_fixed(0.5),
        retry=retry_if_exception_type(httpx.HTTPError) | retry_if_result(lambda healthy: not healthy),
    )
    try:
        wait(lambda: httpx.get(f"{url}/healthz", timeout=5).is_success)
    except RetryError:
        raise DependencyError(
            f"The gateway at {url} did not become healthy within {_READY_TIMEOUT_S:.0f} s.",
            hint="Look at the Serve page of the Ray dashboard.",
        ) from None


def _cause(error: RuntimeError) -> str:
    """The line of Serve's message that says why; the rest is a traceback for a developer."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line or "error" in line), lines[0])
