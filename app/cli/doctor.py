"""`flywheel doctor`: is this machine ready, and what to do where it is not."""

from dataclasses import asdict

import typer
from rich.console import Console
from rich.text import Text

from app.cli.output import AsJson, show, table
from cluster.preflight import check_all
from cluster.storage import Home

EXAMPLES = "Example: `flywheel doctor --json`"
_SIGNS = {"ok": Text("✓ ok", "green"), "warn": Text("! warn", "yellow"), "red": Text("✗ red", "red")}


def run(as_json: AsJson = False) -> None:
    """Check versions, torch build, GPU, vLLM, ports, memory and disk; exit 1 if a line is red."""
    checks = check_all(Home.current())

    def render(console: Console) -> None:
        rows = [(_SIGNS[check.status], check.name, check.found, check.advice or "") for check in checks]
        console.print(table("flywheel doctor", ["", "check", "found", "what to do"], rows))

    healthy = all(check.status != "red" for check in checks)
    show({"healthy": healthy, "checks": [asdict(check) for check in checks]}, render, as_json=as_json)
    if not healthy:
        raise typer.Exit(1)
