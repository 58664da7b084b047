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
from rich.text import Text

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=VALUE", help="Override one setting of the recipe.")
]

# Bound now: while a command is connected to Ray, `sys.stdout` is where libraries print, and that is the log.
# Data is never markup: `list[str]` and `:warning:` are shown as they are. Style goes through `Text`.
console = Console(file=sys.stdout, markup=False, emoji=False)
notes = Console(stderr=True, markup=False, emoji=False)


def show(result: dict[str, Any], render: Callable[[Console], None], *, as_json: bool) -> None:
    """Print `result`: as JSON, or as `render` draws it."""
    if as_json:
        # Escaped where the terminal's encoding would turn letters into question marks.
        ascii_only = "utf" not in (getattr(console.file, "encoding", None) or "utf-8").lower()
        console.file.write(json.dumps(result, default=str, ensure_ascii=ascii_only) + "\n")
        console.file.flush()
    else:
        render(console)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A rich table of literal cells; numbers are aligned to the right. A cell that is a `Text` keeps its style."""
    drawn = Table(title=Text(title, style="table.title"), title_justify="left", header_style="bold", expand=False)
    listed = [list(row) for row in rows]
    for index, column in enumerate(columns):
        numeric = bool(listed) and all(isinstance(row[index], int | float) for row in listed)
        drawn.add_column(Text(column), justify="right" if numeric else "left", overflow="fold")
    for row in listed:
        drawn.add_row(*map(_cell, row))
    return drawn


def _cell(value: object) -> Text:
    if isinstance(value, Text):
        return value
    return Text("-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value))
