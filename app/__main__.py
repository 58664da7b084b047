"""`flywheel VERB` and `python -m app VERB`: one door, and the one place where an error becomes text.

Nothing heavy is imported here: the environment is prepared first, then typer finds the verb, and the verb
imports what it needs.
"""

import json
import signal
import sys
from types import FrameType

from cluster import environment
from cluster.errors import FlywheelError

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run one command line; exit 0 on success, 1 on failure, 2 on a user's mistake, 130 on Ctrl-C."""
    environment.prepare()
    signal.signal(signal.SIGTERM, _terminate)
    from app.cli.application import cli

    try:
        cli()
    except FlywheelError as error:
        _show(error, as_json="--json" in sys.argv)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("\nStopped.\n")
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output went away (`flywheel … | head`): that is its right, not a fault.
        sys.stderr.close()
        sys.exit(0)


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    """SIGTERM unwinds like Ctrl-C, so that everything we started is stopped on the way out."""
    raise KeyboardInterrupt


def _show(error: FlywheelError, *, as_json: bool) -> None:
    if as_json:
        facts = {"type": type(error).__name__, "message": error.message, "hint": error.hint}
        sys.stdout.write(json.dumps({"error": facts}) + "\n")
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    console.print(Text.assemble(("error: ", "bold red"), error.message), soft_wrap=True)
    if error.hint:
        console.print(Text.assemble(("hint:  ", "bold"), error.hint), soft_wrap=True)


if __name__ == "__main__":
    main()
