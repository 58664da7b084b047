"""Which processes belong to a program that we started, what they have used of the CPUs, and how to hold them.

A program is started with a mark in its environment. To it belong all processes that show the mark in
`/proc/PID/environ`, and all their descendants: Ray's daemons leave their parent's tree, but keep the environment; Ray's
workers overwrite the environment with their title, but stay below the raylet.
"""

import os
import secrets
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

MARK: Final = "FLYWHEEL_BENCH_MARK"
_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Mark:
    """Of one program; no two have the same."""

    value: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def environment(self) -> dict[str, str]:
        return {MARK: self.value}


@dataclass(frozen=True)
class _Seen:
    parent: int
    cpu_s: float
    began: int
    """In clock ticks since the machine started: with the pid, which process it is."""


def members(marks: Iterable[Mark]) -> dict[Mark, dict[tuple[int, int], float]]:
    """By mark, its live processes (pid and beginning) and their CPU seconds so far, without those of children."""
    wanted = {f"{MARK}={mark.value}".encode(): mark for mark in marks}
    seen: dict[int, _Seen] = {}
    owner: dict[int, Mark | None] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            environ = (entry / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        pid = int(entry.name)
        seen[pid] = _Seen(int(fields[1]), (int(fields[11]) + int(fields[12])) * _TICK_S, int(fields[19]))
        for text in environ:
            if text in wanted:
                owner[pid] = wanted[text]
    found: dict[Mark, dict[tuple[int, int], float]] = {mark: {} for mark in wanted.values()}
    for pid, process in seen.items():
        mark = _owner(pid, seen, owner)
        if mark is not None:
            found[mark][pid, process.began] = process.cpu_s
    return found


def _owner(pid: int, seen: dict[int, _Seen], owner: dict[int, Mark | None]) -> Mark | None:
    if pid not in owner:
        owner[pid] = _owner(seen[pid].parent, seen, owner) if pid in seen else None
    return owner[pid]


def used_s(before: dict[tuple[int, int], float], after: dict[tuple[int, int], float]) -> float:
    """CPU seconds between two looks. Of a process that ended in between the last part is missed."""
    return sum(cpu - before.get(process, 0.0) for process, cpu in after.items())


def pause(mark: Mark) -> None:
    """Stop all processes of a program where they are: a Ray that has nothing to do still takes a tenth of a CPU."""
    _tell(mark, signal.SIGSTOP)


def go_on(mark: Mark) -> None:
    """Let a paused program run again."""
    _tell(mark, signal.SIGCONT)


def end(mark: Mark, *, within_s: float = 5.0) -> None:
    """Kill what is left of a program, and wait until it is gone."""
    deadline = time.monotonic() + within_s
    while _tell(mark, signal.SIGKILL) and time.monotonic() < deadline:
        time.sleep(0.1)


def _tell(mark: Mark, what: signal.Signals) -> int:
    """Send a signal to all of a program; returns to how many."""
    found = members([mark])[mark]
    for pid, _ in found:
        with suppress(ProcessLookupError):
            os.kill(pid, what)
    return len(found)
