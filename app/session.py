"""A command's connection to Ray: `cluster.session.connect`, with stdout kept for the command's results."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout

from cluster.session import Session, connect
from cluster.telemetry import PrintsToLog


@contextmanager
def connected(*, start: bool = True) -> Iterator[Session]:
    """`connect`, while whatever Ray and its libraries print goes to the log.

    Ray prints the cluster's troubles to stdout whatever it is told (ray 2.60). A caller that has put something
    of its own there (pytest's capture) keeps it.
    """
    ours = sys.stdout is sys.__stdout__
    with redirect_stdout(PrintsToLog("ray")) if ours else nullcontext(), connect(start=start) as session:
        yield session
