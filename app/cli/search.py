"""`flywheel search`: ask a collection."""

from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console

from app.cli.connection import Key, Url, api_key, gateway_url
from app.cli.output import AsJson, show, table
from app.pipelines.gateway import connect, not_the_gateway, post

EXAMPLES = 'Example: `flywheel search python-functions "read a file in chunks" -k 5`'


def run(
    collection: Annotated[str, typer.Argument(help="Name of the collection.")],
    query: Annotated[str, typer.Argument(help="What to look for.")],
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="Number of hits.")] = 10,
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Search a collection of the running application."""
    address, secret = gateway_url(url), api_key(key)
    path = f"/v1/collections/{quote(collection, safe='')}/search"
    with connect(address, secret, timeout_s=300) as client:
        found = post(client, path, {"query": query, "k": k})
    hits: Any = found.get("data")
    try:
        rows = [(hit["score"], hit["id"], _first_line(hit["text"])) for hit in hits]
    except (TypeError, KeyError, AttributeError):
        raise not_the_gateway(address) from None

    def render(console: Console) -> None:
        console.print(table(f"{collection}: {query}", ["score", "id", "text"], rows))

    show(found, render, as_json=as_json)


def _first_line(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= 100 else line[:99] + "…"
