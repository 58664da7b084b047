"""Competitors that stay alive and run by turns, so that each has the whole machine while it is measured.

A competitor is any process that steps and calls `Ticket.mark` between two steps; there it waits until the referee
calls it. What happens on the machine meanwhile hits all of them alike, and a comparison is one of neighbouring turns.
Knows nothing of training.
"""

import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, Final, Self

_ENDING_S: Final = 60.0


@dataclass(frozen=True)
class Turn:
    """What `steps` steps took: seconds by the clock, and by this process's own use of the CPUs.

    `said` is what the competitor said with its last mark.
    """

    steps: int
    wall_s: float
    cpu_s: float
    said: Any = None


@dataclass
class Ticket:
    """A competitor's line to the referee. Can be pickled until it is first used."""

    name: str
    address: Any
    key: bytes = field(repr=False)
    _line: Connection | None = field(default=None, repr=False)
    _left: int = 0
    _steps: int = 0
    _over: bool = False
    _wall: float = 0.0
    _cpu: float = 0.0

    def mark(self, said: Any = None) -> None:
        """Between two steps. The first call, after a step that warmed up, waits for the first turn.

        `said` reaches the referee with the first call, and with the last one of each turn. Once the referee is gone,
        nobody waits any more.
        """
        if self._over:
            return
        if self._left > 1:
            self._left -= 1
            return
        news: Any = said
        if self._line is None:
            self._line = Client(self.address, authkey=self.key)
            self._line.send(self.name)
        else:
            news = Turn(self._steps, time.perf_counter() - self._wall, time.process_time() - self._cpu, said)
        try:
            self._line.send(news)
            self._left = self._steps = self._line.recv()
        except (EOFError, OSError):
            self._over = True
            return
        self._wall, self._cpu = time.perf_counter(), time.process_time()


class Referee:
    """Calls one competitor after the other."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)
        self._listener = Listener(("127.0.0.1", 0), authkey=self._key)
        self._arrived: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._lines: dict[str, Connection] = {}
        self._processes: dict[str, tuple[SpawnProcess, bool]] = {}
        self.said: dict[str, Any] = {}
        """By competitor, what its first mark said."""
        threading.Thread(target=self._receive, name="arrivals", daemon=True).start()

    def admit(self, name: str, play: Callable[..., None], *args: Any, ends_itself: bool = False) -> None:
        """Start `play(ticket, *args)` in a process of its own, and return when it stands before its first turn.

        `ends_itself`: it is given time to end, because it has more to put away than its own memory.
        """
        process = SpawnContext().Process(target=play, args=(Ticket(name, self._listener.address, self._key), *args))
        process.start()
        self._processes[name] = (process, ends_itself)
        while name not in self._lines:
            try:
                line = self._arrived.get(timeout=1)
            except queue.Empty:
                self._require_alive(name)
            else:
                self._lines[line.recv()] = line
        self.said[name] = self._answer(name)

    def turn(self, name: str, steps: int) -> Turn:
        """Let `name` make so many steps, alone."""
        self._lines[name].send(steps)
        answer: Turn = self._answer(name)
        return answer

    def rounds(self, one: str, other: str, *, runs: int, steps: int) -> list[tuple[Turn, Turn]]:
        """`runs` pairs of neighbouring turns, after one step of each that does not count; who begins alternates."""
        for name in (one, other):
            self.turn(name, 1)
        pairs = []
        for number in range(runs):
            order = (one, other) if number % 2 == 0 else (other, one)
            taken = {name: self.turn(name, steps) for name in order}
            pairs.append((taken[one], taken[other]))
        return pairs

    def close(self) -> None:
        """End all."""
        for line in self._lines.values():
            line.close()
        for process, ends_itself in self._processes.values():
            if ends_itself:
                process.join(_ENDING_S)
            if process.is_alive():
                process.kill()
            process.join()
        self._listener.close()

    def _receive(self) -> None:
        while True:
            try:
                self._arrived.put(self._listener.accept())
            except OSError:  # closed
                return

    def _answer(self, name: str) -> Any:
        while not self._lines[name].poll(1):
            self._require_alive(name)
        try:
            return self._lines[name].recv()
        except EOFError:
            raise RuntimeError(f"{name} left while it was its turn") from None

    def _require_alive(self, name: str) -> None:
        process, _ = self._processes[name]
        if not process.is_alive():
            raise RuntimeError(f"{name} ended (exit status {process.exitcode}) while it was its turn")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
