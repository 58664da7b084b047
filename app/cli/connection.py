"""How a verb finds the application's address: `--url`, else the kept session's, else the default port; and its key."""

from typing import Annotated

import httpx
import typer

from cluster import environment
from cluster.errors import ConfigError
from cluster.session import Beacon
from cluster.storage import Home

Url = Annotated[str | None, typer.Option("--url", help="Address of the gateway, for example http://127.0.0.1:8000")]
Key = Annotated[
    str | None, typer.Option("--key", help="API key; better in FLYWHEEL_API_KEY, where `ps` does not show it.")
]
_DEFAULT = "http://127.0.0.1:8000"


def api_key(given: str | None) -> str | None:
    """The API key to send: `--key`, else `FLYWHEEL_API_KEY`; None: a gateway without keys is asked."""
    key = (given or "").strip() or environment.api_key()
    if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
        # Not shown, unlike other values at fault: it may be most of a real one.
        raise ConfigError("The API key holds a character that none of ours has.", hint="Copy it again: fw-….")
    return key


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
