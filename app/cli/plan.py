"""`flywheel plan`: does a recipe fit this machine, and which knob to turn if not."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from app import recipe as recipes
from app.cli.output import AsJson, Assignments, show, table
from app.pipelines.plan import Room, plan
from cluster.errors import ConfigError
from cluster.storage import Home

EXAMPLES = "Examples: `flywheel plan error-triage` · `flywheel plan my.yaml --set data.max_length=1024`"
_SIGNS = {"ok": Text("✓", "green"), "warn": Text("!", "yellow"), "red": Text("✗", "red")}


def run(
    recipe: Annotated[str, typer.Argument(help="Recipe: a path or a shipped name.")],
    gpu_gib: Annotated[float | None, typer.Option(help="Plan for a GPU of so many GiB for each rank.")] = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Check batch, memory, time, room, data, upload and disk without starting anything; exit 1 if it does not fit."""
    if gpu_gib is not None and not 0 < gpu_gib < math.inf:
        raise ConfigError(f"--gpu-gib {gpu_gib} is no size of a GPU.", hint="Give its memory in GiB, for example 24.")
    room = None if gpu_gib is None else Room(gpu_gib, "on each GPU", on_gpu=True)
    lines = plan(recipes.load(recipe, assignments or ()), Home.current(), Path.cwd(), room)
    fits = all(line.status != "red" for line in lines)

    def render(console: Console) -> None:
        rows = [(_SIGNS[line.status], line.name, line.found, line.advice) for line in lines]
        console.print(table(f"flywheel plan {recipe}", ["", "check", "found", "what to do"], rows))
        console.print("Fits." if fits else "Does not fit.")

    show({"fits": fits, "lines": [asdict(line) for line in lines]}, render, as_json=as_json)
    if not fits:
        raise typer.Exit(1)
