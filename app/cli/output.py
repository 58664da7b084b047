"""What a command prints: tables for people, one JSON object on the last line for machines.

Progress and notes go to stderr, results to stdout, so that `--json` output can be piped.
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=VALUE", help="Override one setting of the recipe.")
]

# Bound now: while Ray is connected, `sys.stdout` is where libraries print, and that is the log.
console = Console(file=sys.stdout)
notes = Console(stderr=True)


def show(result: dict[str, Any], render: Callable[[Console], None], *, as_json: bool) -> None:
    """Print `result`: as JSON, or as `render` draws it."""
    if as_json:
        console.file.write(json.dumps(result, default=str, ensure_ascii=False) + "\n")
        console.file.flush()
    else:
        render(console)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A rich table of text cells; numbers are aligned to the right."""
    drawn = Table(title=title, title_justify="left", header_style="bold", expand=False)
    listed = [list(row) for row in rows]
    for index, column in enumerate(columns):
        numeric = bool(listed) and all(isinstance(row[index], int | float) for row in listed)
        drawn.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in listed:
        drawn.add_row(
            *("-" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row)
        )
    return drawn
