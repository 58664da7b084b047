"""How a verb finds the application's address: `--url`, else the kept session's, else the default port."""

from typing import Annotated

import httpx
import typer

from cluster.errors import ConfigError
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
