"""Which processes belong to an installation: those whose environment names its FLYWHEEL_HOME."""

import os
import time
from pathlib import Path

from cluster import environment


def of_home(root: Path) -> dict[int, str]:
    """Pid → command line of every live process of `root`, this one excepted."""
    mark = f"{environment.HOME}={root}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def all_gone(root: Path, *, within_s: float) -> dict[int, str]:
    """What is still there of `root` after at most `within_s`; empty is good."""
    deadline = time.monotonic() + within_s
    while (left := of_home(root)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left
