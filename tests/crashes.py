"""Deaths by `kill -9` at every write of a function: the first write, the second, … until it gets through alive.

A child is forked for each death from a process that has imported everything already and has no threads
(`python -m tests.crashes`), so that a hundred deaths take seconds. In the child these are write points:

    sql    before and after every statement that writes, before and after every commit
    file   before every open for writing, rename, link, mkdir, unlink, … under `root`; before and after data is
           written through a descriptor (`os.write`, `sendfile`, `copy_file_range`), and at every `fsync`

Between two points nothing is written that another process could see, but for what SQLite does within a statement
or a commit, which is SQLite's own matter.
"""

import importlib
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from sqlalchemy import Engine, event
from sqlalchemy.engine.default import DefaultDialect

Kind = Literal["sql", "file"]

EVERYWHERE: Final[tuple[Kind, ...]] = ("sql", "file")
_LIMIT_S: Final = 30
_READS: Final = ("SELECT", "PRAGMA", "SHOW", "BEGIN")
_AUDITED: Final = frozenset(
    {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.utime", "os.chmod"}
)
_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class _Job:
    """`act(prepare(*arguments))`, with points counted from `act` on."""

    prepare: Callable[..., Any]
    act: Callable[[Any], object]
    arguments: tuple[Any, ...]
    root: Path
    at: int
    kinds: tuple[Kind, ...]


class Crasher:
    """Starts the process that forks, and asks it for deaths. `warm`: modules that the functions import late."""

    def __init__(self, *, warm: Sequence[str] = ()) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.crashes", *warm],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def deaths(
        self,
        prepare: Callable[..., Any],
        act: Callable[[Any], object],
        *arguments: Any,
        root: Path,
        kinds: tuple[Kind, ...] = EVERYWHERE,
    ) -> Iterator[str]:
        """Where each child died, one after the other; it ends when one has not died.

        A child carries out `act(prepare(*arguments))`, and may die in `act`. Both are functions of a module, and
        everything can be pickled. `AssertionError` with the child's traceback if it raises.
        """
        for number in itertools.count(1):
            died_at = self._run(_Job(prepare, act, arguments, root, number, kinds))
            if died_at is None:
                return
            yield f"{number}: {died_at}"

    def close(self) -> None:
        """End the process that forks."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=10)
        if self._server.stdout is not None:
            self._server.stdout.close()

    def _run(self, job: _Job) -> str | None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        pickle.dump(job, self._server.stdin)
        self._server.stdin.flush()
        status, said = pickle.load(self._server.stdout)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return str(said)
        assert status == 0, said or f"ended with status {status} after {_LIMIT_S} s or less"
        return None


def _serve() -> None:
    """Answer each job with how its child ended and what it said last. Until stdin is closed."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for module in sys.argv[1:]:
        importlib.import_module(module)
    while True:
        try:
            # Unpickled here and not in the child: this imports the module of the functions, once.
            job: _Job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _live(job, writing)
        os.close(writing)
        with os.fdopen(reading, "rb") as said:
            last = said.read().decode(errors="replace")
        _, status = os.waitpid(child, 0)
        pickle.dump((status, last), answers)
        answers.flush()


def _live(job: _Job, said: int) -> None:
    """All of a child's life; it does not return."""
    write, code = os.write, 1
    signal.alarm(_LIMIT_S)

    def die(where: str) -> None:
        write(said, where.encode())
        os.kill(os.getpid(), signal.SIGKILL)
        # Another thread would go on until the signal arrives.
        threading.Event().wait()

    try:
        subject = job.prepare(*job.arguments)
        _arm(job, die)
        job.act(subject)
        code = 0
    except BaseException:  # noqa: BLE001 (whatever it is, the test must see it)
        write(said, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _arm(job: _Job, die: Callable[[str], None]) -> None:
    """From here on, count the points, and die at number `job.at`."""
    count = itertools.count(1)
    root = os.path.realpath(job.root)

    def point(kind: Kind, what: str) -> None:
        if kind in job.kinds and next(count) == job.at:
            die(what)

    _watch_sql(point)
    _watch_files(point, root)


def _watch_sql(point: Callable[[Kind, str], None]) -> None:
    def before(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if not statement.lstrip().upper().startswith(_READS):
            point("sql", f"before {statement[:60]!r}")

    def after(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if not statement.lstrip().upper().startswith(_READS):
            point("sql", f"after {statement[:60]!r}")

    event.listen(Engine, "before_cursor_execute", before)
    event.listen(Engine, "after_cursor_execute", after)
    commit = DefaultDialect.do_commit

    def do_commit(self: DefaultDialect, connection: Any) -> None:
        point("sql", "before COMMIT")
        commit(self, connection)
        point("sql", "after COMMIT")

    DefaultDialect.do_commit = do_commit  # type: ignore[method-assign]


def _watch_files(point: Callable[[Kind, str], None], root: str) -> None:
    def of(descriptor: int) -> Path:
        return Path(f"/proc/self/fd/{descriptor}").readlink()

    def under(path: Any, folder: Any = -1) -> bool:
        if isinstance(path, int):
            return str(of(path)).startswith(root)
        named = os.fsdecode(path)
        if not named.startswith("/") and isinstance(folder, int) and folder >= 0:
            named = f"{of(folder)}/{named}"
        return os.path.abspath(named).startswith(root)  # noqa: PTH100 (a path may be bytes, and nothing is looked up)

    def heard(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "open":
            path, _, flags = arguments
            if isinstance(path, str | bytes) and flags & _WRITING and under(path):
                point("file", f"before open of {os.fsdecode(path)}")
        elif name in _AUDITED and under(arguments[0], arguments[-1]):
            point("file", f"before {name} of {arguments[0]!r}")

    def wrap(name: str, which: int) -> None:
        call = getattr(os, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            ours = under(arguments[which])
            if ours:
                point("file", f"before {name}")
            result = call(*arguments, **named)
            if ours and name != "fsync":
                point("file", f"after {name}")
            return result

        setattr(os, name, watched)

    for name, which in (("fsync", 0), ("fdatasync", 0), ("write", 0), ("sendfile", 0), ("copy_file_range", 1)):
        wrap(name, which)
    # An audit hook hears of the call whoever makes it, under whatever name it was imported.
    sys.addaudithook(heard)


if __name__ == "__main__":
    _serve()
