"""How a verb finds the application's address: `--url`, else the kept session's, else the default port."""

from typing import Annotated

import httpx
import typer

from cluster.errors import ConfigError, DependencyError, RequestError
from cluster.session import Beacon
from cluster.storage import Home

Url = Annotated[str | None, typer.Option("--url", help="Address of the gateway, for example http://127.0.0.1:8000")]
_DEFAULT = "http://127.0.0.1:8000"


def gateway_url(url: str | None) -> str:
    """The gateway's address without a trailing slash."""
    beacon = Beacon.read(Home.current())
    found = (url or (beacon.gateway_url if beacon else None) or _DEFAULT).rstrip("/")
    try:
        parts = httpx.URL(found)
        usable = parts.scheme in ("http", "https") and bool(parts.host)
    except httpx.InvalidURL:
        usable = False
    if not usable:
        raise ConfigError(f"--url {found!r} is no address.", hint="Write it like http://127.0.0.1:8000.")
    return found


def call(method: str, url: str, path: str, body: dict[str, object] | None = None) -> dict[str, object]:
    """One JSON request to the gateway; its error shape becomes our error, an absent gateway a clear one."""
    try:
        response = httpx.request(method, f"{url}{path}", json=body, timeout=300)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DependencyError(
            f"The gateway at {url} cannot be reached: {error or type(error).__name__}.",
            hint="Start it with `flywheel demo --keep` or `flywheel serve RECIPE`, or give its address with --url.",
        ) from None
    if response.is_error:
        raise RequestError(_message(response), status=response.status_code)
    try:
        result = response.json()
    except ValueError:
        result = None
    if not isinstance(result, dict):
        raise not_the_gateway(url)
    return result


def not_the_gateway(url: str) -> DependencyError:
    """Something answers there, but not as the gateway does."""
    return DependencyError(
        f"What answers at {url} is not the gateway of Flywheel.",
        hint="Give the gateway's address with --url; `flywheel status` names it.",
        retryable=False,
    )


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code} from {response.request.url}: {response.text[:200]}"
