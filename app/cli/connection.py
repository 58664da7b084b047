"""How a verb finds the application's address: `--url`, else the kept session's, else the default port."""

from typing import Annotated

import httpx
import typer

from cluster.errors import DependencyError, RequestError
from cluster.session import Beacon
from cluster.storage import Home

Url = Annotated[str | None, typer.Option("--url", help="Address of the gateway, for example http://127.0.0.1:8000")]
_DEFAULT = "http://127.0.0.1:8000"


def gateway_url(url: str | None) -> str:
    """The gateway's address without a trailing slash."""
    beacon = Beacon.read(Home.current())
    return (url or (beacon.gateway_url if beacon else None) or _DEFAULT).rstrip("/")


def call(method: str, url: str, path: str, body: dict[str, object] | None = None) -> dict[str, object]:
    """One JSON request to the gateway; its error shape becomes our error, an absent gateway a clear one."""
    try:
        response = httpx.request(method, f"{url}{path}", json=body, timeout=300)
    except httpx.HTTPError as error:
        raise DependencyError(
            f"The gateway at {url} cannot be reached: {error or type(error).__name__}.",
            hint="Start it with `flywheel demo --keep` or `flywheel serve RECIPE`, or give its address with --url.",
        ) from None
    if response.is_error:
        raise RequestError(_message(response), status=response.status_code)
    result: dict[str, object] = response.json()
    return result


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code} from {response.request.url}: {response.text[:200]}"
