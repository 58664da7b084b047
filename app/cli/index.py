"""`flywheel index`: documents into a collection of the running application."""

from dataclasses import asdict
from typing import Annotated

import typer

from app.cli.connection import Key, Url, api_key, gateway_url
from app.cli.output import AsJson, notes, show
from app.display import Display
from cluster.storage import Home

EXAMPLES = "Example: `flywheel index python-functions python-functions --documents 500`"


def run(
    collection: Annotated[str, typer.Argument(help="Name of the collection; it is made if it is not there.")],
    source: Annotated[str, typer.Argument(help="Data version of query/positive pairs: a name or name@digest.")],
    documents: Annotated[int, typer.Option(min=1, help="Documents to write.")] = 2000,
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Embed and write documents; returns when every one is durable and can be found."""
    from actors.data.version import load
    from app.pipelines.index import index, pool

    secret = api_key(key)
    home = Home.current()
    pairs = pool(load(home, source), home, documents=documents)
    with Display(notes) as display, display.stage("index"):
        indexed = index(gateway_url(url), collection, pairs, display, key=secret)
    rate = indexed.documents / indexed.seconds
    show(
        asdict(indexed),
        lambda console: console.print(f"{indexed.documents} documents in {indexed.collection} ({rate:.0f} a second)."),
        as_json=as_json,
    )
