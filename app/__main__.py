"""`flywheel VERB` and `python -m app VERB`: one door, and the one place where an error becomes text.

Nothing heavy is imported here: the environment is prepared first, then typer finds the verb, and the verb
imports what it needs.
"""

import errno
import io
import json
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

from cluster import environment
from cluster.errors import ConfigError, DependencyError, FlywheelError
from cluster.storage import DISK_FULL

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run one command line; exit 0 on success, 1 on failure, 2 on a user's mistake, 130 on Ctrl-C."""
    try:
        code = _guarded(sys.argv[1:])
    except KeyboardInterrupt:
        with suppress(OSError):
            sys.stderr.write("\nStopped.\n")
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away (`flywheel … | head`): that is its right, not a fault.
        code = 0
    except FlywheelError as error:
        code = _show(error)
    except OSError as error:
        # One line for the person; where it came from goes to the log file, if the command has opened it.
        logging.getLogger(__name__).info("ended by %s", error, exc_info=error)
        code = _show(_explain(error))
    _leave_no_output_behind()
    sys.exit(code)


def _guarded(arguments: list[str]) -> int:
    _open_streams()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError("The current folder is not there any more.", hint="Go to one that is: `cd`.") from None
    environment.prepare()
    import typer
    from typer.main import get_command

    from app.cli.application import cli

    try:
        # Not `cli()`: that turns Ctrl-C, a closed pipe and a usage error into exits of its own.
        with get_command(cli).make_context("flywheel", arguments) as context:
            context.command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as end:
        sys.stdout.flush()
        return end.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    except typer.TyperException as error:
        if not error.format_message():  # no argument at all: the help was shown
            sys.stdout.flush()
            return error.exit_code
        at = getattr(error, "ctx", None)
        path = at.command_path if at else "flywheel"
        raise ConfigError(error.format_message(), hint=f"`{path} --help` shows how it is called.") from None
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich's answer to a closed pipe
            raise BrokenPipeError from None
        raise
    return 0


def _open_streams() -> None:
    """Streams that can be written whatever was closed, and whatever the locale's encoding cannot say."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _leave_no_output_behind() -> None:
    """Flush, and drop what cannot be: the interpreter would complain about it on its way out."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    """SIGTERM unwinds like Ctrl-C, so that everything we started is stopped on the way out."""
    raise KeyboardInterrupt


def _explain(error: OSError) -> FlywheelError:
    """A file or device that did not do what was asked: its name and the system's reason."""
    where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    hint = None
    if error.errno in DISK_FULL:
        hint = f"Free some disk where the output goes, or set {environment.HOME} to a folder with room."
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = f"Change its permissions, or set {environment.HOME} to a folder of yours."
    return DependencyError(f"{where}{error.strerror or error or type(error).__name__}.", hint=hint, retryable=False)


def _show(error: FlywheelError) -> int:
    """Print the error where the caller looks for it; returns the exit code."""
    if "--json" in sys.argv:
        facts = {"type": type(error).__name__, "message": error.message, "hint": error.hint}
        try:
            sys.stdout.write(json.dumps({"error": facts}) + "\n")
            sys.stdout.flush()
            return error.exit_code
        except BrokenPipeError:
            return error.exit_code
        except OSError:
            pass  # stdout itself is what cannot be written: say it on stderr
    from rich.console import Console
    from rich.text import Text

    with suppress(OSError):
        console = Console(stderr=True)
        console.print(Text.assemble(("error: ", "bold red"), error.message), soft_wrap=True)
        if error.hint:
            console.print(Text.assemble(("hint:  ", "bold"), error.hint), soft_wrap=True)
    return error.exit_code


if __name__ == "__main__":
    main()
