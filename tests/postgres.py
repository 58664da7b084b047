"""A real PostgreSQL of the tests' own, from Debian's binaries: started on loopback, ended with the session.

It is as durable as the one in production (`fsync` and `synchronous_commit` stay on), because durability is what
is tested, and small in everything else. `Proxy` stands between it and a client, to lose what a network loses.
"""

import ctypes
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import quote

import psycopg
import pytest
from psycopg import sql

REQUIRED: Final = "FLYWHEEL_REQUIRE_POSTGRES"
"""Set to 1 where a missing PostgreSQL must fail the tests and not skip them, as CI does."""

USER: Final = "fly@wheel"
PASSWORD: Final = "p@ss/w:rd?#&% ü"
"""With every character that a URI gives a meaning to."""

_MISSING: Final = "PostgreSQL's server is not installed: apt-get install postgresql"
_READY_WITHIN_S: Final = 30.0
_PR_SET_PDEATHSIG: Final = 1
_SETTINGS: Final[Mapping[str, str]] = {
    "listen_addresses": "127.0.0.1",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "max_connections": "50",
    "shared_buffers": "16MB",
    "jit": "off",
    "autovacuum": "off",
    "log_min_messages": "warning",
}

Rows = dict[str, list[tuple[Any, ...]]]


class Postgres:
    """One server in `folder`; it may be stopped, crashed and started again, on the same port."""

    def __init__(self, folder: Path, binaries: Path) -> None:
        self._folder = folder
        self._binaries = binaries
        self._data = folder / "data"
        self._log = folder / "log"
        self._server: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)
        self._account = _account()
        self.port = free_port()
        self._initialise()
        self.start()

    def start(self) -> None:
        """Come up, recovering if the last end was a crash, and return when connections are answered."""
        # The server is told of the death of the thread that started it, not of the process.
        assert threading.current_thread() is threading.main_thread()
        options = {**_SETTINGS, "port": str(self.port), "unix_socket_directories": str(self._folder)}
        command = [str(self._binaries / "postgres"), "-D", str(self._data)]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        with self._log.open("ab") as log:
            self._server = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=_die_with_us, **self._as_user())
        deadline = time.monotonic() + _READY_WITHIN_S
        while True:
            try:
                psycopg.connect(self.uri("postgres"), connect_timeout=5).close()
            except psycopg.OperationalError:
                if self._server.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(self._log.read_text(errors="replace")) from None
                time.sleep(0.05)
            else:
                return

    def stop(self) -> None:
        """An orderly end that throws every client out (`pg_ctl stop -m fast`)."""
        self._end(signal.SIGINT)

    def crash(self) -> None:
        """End without a word to anybody and without a checkpoint (`pg_ctl stop -m immediate`)."""
        self._end(signal.SIGQUIT)

    def restart(self) -> None:
        """`pg_ctl restart -m immediate`."""
        self.crash()
        self.start()

    def uri(self, database: str, *, port: int | None = None, driver: str = "postgresql") -> str:
        """The URI of a database of this server, with its user's password."""
        return f"{driver}://{quote(USER, safe='')}:{quote(PASSWORD, safe='')}@127.0.0.1:{port or self.port}/{database}"

    def create_database(self) -> str:
        """The name of a new, empty database."""
        name = f"db{next(self._numbers)}"
        with psycopg.connect(self.uri("postgres"), autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return name

    def _initialise(self) -> None:
        password = self._folder / "password"
        password.write_text(PASSWORD)
        if os.getuid() == 0:
            for path in (self._folder, password):
                os.chown(path, self._account.pw_uid, self._account.pw_gid)
        command = [self._binaries / "initdb", "-D", self._data, "--username", USER, "--pwfile", password]
        command += ["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync", "--wal-segsize=1"]
        done = subprocess.run(command, capture_output=True, timeout=60, check=False, **self._as_user())
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        password.unlink()

    def _as_user(self) -> dict[str, Any]:
        place: dict[str, Any] = {
            "cwd": self._folder,
            "stdin": subprocess.DEVNULL,
            "env": {"HOME": str(self._folder), "PATH": os.environ.get("PATH", ""), "LC_ALL": "C"},
            # Ctrl-C is for the tests; the server ends when they have ended.
            "start_new_session": True,
        }
        if os.getuid() == 0:
            # PostgreSQL refuses to run as root.
            place |= {"user": self._account.pw_uid, "group": self._account.pw_gid, "extra_groups": []}
        return place

    def _end(self, how: signal.Signals) -> None:
        if self._server is not None:
            self._server.send_signal(how)
            self._server.wait(timeout=30)
            self._server = None


class Proxy:
    """A TCP port that leads to `port`, and loses connections or answers when told to."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._at_commit: Literal["lose", "freeze"] | None = None
        self._lost = threading.Event()
        self._healed = threading.Event()
        self.frozen = threading.Event()
        """Set while nothing is forwarded."""
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_next_commit_answer(self) -> Callable[[], bool]:
        """The next COMMIT reaches the server, its answer nobody: the connection breaks. Returns: has it happened?"""
        self._at_commit = "lose"
        return self._lost.is_set

    def freeze_before_next_commit(self) -> None:
        """The next COMMIT goes nowhere, and nothing does from then on: a partition in mid-transaction."""
        self._at_commit = "freeze"

    def freeze(self) -> None:
        """Forward nothing any more, in either direction, and close nothing: a partition."""
        self.frozen.set()

    def heal(self) -> None:
        """Forward what has waited, and all that comes."""
        self.frozen.clear()
        self._healed.set()

    def close(self) -> None:
        """Break every connection."""
        self.heal()
        for each in (self._listener, *self._open):
            _shut(each)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            self._open += [client, server]
            lost = threading.Event()
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(source, target, source is client, lost), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, outward: bool, lost: threading.Event) -> None:
        with suppress(OSError):
            while chunk := source.recv(1 << 16):
                if outward and b"COMMIT" in chunk and self._at_commit is not None:
                    todo, self._at_commit = self._at_commit, None
                    (lost if todo == "lose" else self.frozen).set()
                if self.frozen.is_set():
                    self._healed.wait()
                if lost.is_set() and not outward:
                    # The answer has come, so the server has committed.
                    self._lost.set()
                    break
                target.sendall(chunk)
        _shut(source)
        _shut(target)


def _shut(side: socket.socket) -> None:
    with suppress(OSError):
        side.shutdown(socket.SHUT_RDWR)


def dump(uri: str) -> Rows:
    """Every row of every table of the database."""
    with psycopg.connect(uri) as connection:
        names = [name for (name,) in connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")]
        return {name: connection.execute(_named("SELECT * FROM {}", name)).fetchall() for name in sorted(names)}


def restore(uri: str, rows: Rows) -> None:
    """Bring the database back to a `dump` of it: tables that it did not have go, the others hold its rows again."""
    with psycopg.connect(uri) as connection:
        for name in dump(uri):
            connection.execute(_named("DELETE FROM {}" if name in rows else "DROP TABLE {}", name))
        for name, kept in rows.items():
            for row in kept:
                values = sql.SQL(", ").join(sql.Placeholder() * len(row))
                connection.execute(_named("INSERT INTO {} VALUES ({values})", name, values=values), row)


@contextmanager
def server() -> Iterator[Postgres]:
    """A PostgreSQL for as long as the block lasts; skips (or fails, see `REQUIRED`) where there is none."""
    binaries = find_binaries()
    if binaries is None:
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{REQUIRED}=1, but {_MISSING}")
        pytest.skip(_MISSING)
    # A short path of its own: a socket's may have 107 letters, and pytest's folders belong to root alone.
    folder = Path(tempfile.mkdtemp(prefix="fw-pg-", dir="/tmp"))
    try:
        started = Postgres(folder, binaries)
        try:
            yield started
        finally:
            # Nobody will read it again; an orderly stop writes everything to the disk first.
            started.crash()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def find_binaries() -> Path | None:
    """The folder of `initdb` and `postgres`: the newest of Debian's, or on the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    onpath = shutil.which("initdb")
    best = found[-1] if found else Path(onpath).resolve() if onpath else None
    return best.parent if best is not None and (best.parent / "postgres").exists() else None


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _account() -> pwd.struct_passwd:
    if os.getuid() != 0:
        return pwd.getpwuid(os.getuid())
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


def _die_with_us() -> None:
    """In the server before it starts: an immediate shutdown when the tests die, however they die."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)


def _named(statement: str, table: str, **parts: sql.Composable) -> sql.Composed:
    return sql.SQL(statement).format(sql.Identifier(table), **parts)  # type: ignore[arg-type]
