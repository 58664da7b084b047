"""The running application as a client sees it: one JSON request, and its faults as our errors."""

from typing import Any

import httpx

from cluster.errors import DependencyError, RequestError


def connect(url: str, key: str | None, *, timeout_s: float) -> httpx.Client:
    """A client of the gateway at `url` that sends the API key `key`, if there is one."""
    return httpx.Client(base_url=url, timeout=timeout_s, headers={"authorization": f"Bearer {key}"} if key else None)


def post(client: httpx.Client, path: str, body: dict[str, object]) -> dict[str, Any]:
    """The JSON object that answers. The gateway's error shape becomes `RequestError`; no gateway, `DependencyError`."""
    url = str(client.base_url).rstrip("/")
    try:
        response = client.post(path, json=body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise unreachable(url, str(error) or type(error).__name__) from None
    if response.is_error:
        raise RequestError(_message(response), status=response.status_code)
    try:
        result = response.json()
    except ValueError:
        result = None
    if not isinstance(result, dict):
        raise not_the_gateway(url)
    return result


def unreachable(url: str, reason: str) -> DependencyError:
    """Nothing answers there."""
    return DependencyError(
        f"The gateway at {url} cannot be reached: {reason.rstrip('.')}.",
        hint="Start it with `flywheel demo --keep` or `flywheel serve RECIPE`, or give its address with --url.",
    )


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
