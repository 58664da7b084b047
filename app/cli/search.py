"""`flywheel search`: ask a collection."""

from typing import Annotated, Any

import typer
from rich.console import Console

from app.cli.connection import Url, call, gateway_url
from app.cli.output import AsJson, show, table

EXAMPLES = 'Example: `flywheel search python-functions "read a file in chunks" -k 5`'


def run(
    collection: Annotated[str, typer.Argument(help="Name of the collection.")],
    query: Annotated[str, typer.Argument(help="What to look for.")],
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="Number of hits.")] = 10,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Search a collection of the running application."""
    found = call("POST", gateway_url(url), f"/v1/collections/{collection}/search", {"query": query, "k": k})
    hits: list[dict[str, Any]] = found["data"]  # type: ignore[assignment]

    def render(console: Console) -> None:
        rows = [(hit["score"], hit["id"], _first_line(hit["text"])) for hit in hits]
        console.print(table(f"{collection}: {query}", ["score", "id", "text"], rows))

    show(found, render, as_json=as_json)


def _first_line(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= 100 else line[:99] + "…"
