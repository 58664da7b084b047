"""One way to open a SQL database: SQLite on a laptop, PostgreSQL by URI, the same SQLAlchemy code above it.

This module knows SQLAlchemy. It must not know which tables stand in a database, nor what they mean.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from cluster.errors import ConfigError, DependencyError

_BUSY_TIMEOUT_MS: Final = 20_000


def sqlite_uri(path: Path) -> str:
    """The SQLAlchemy URI of the SQLite file at `path` (absolute)."""
    return URL.create("sqlite", database=str(path.absolute())).render_as_string()


def without_password(uri: str) -> str:
    """`uri` as it may be shown and logged."""
    return make_url(uri).render_as_string(hide_password=True)


def open_engine(uri: str) -> Engine:
    """A pool of connections to the database at `uri`; nothing is connected before the first use.

    SQLite runs with a write-ahead log and full synchronisation: a committed transaction survives the death of
    the process and of the machine, and readers do not wait for the writer.
    `ConfigError` for a URI that cannot be used, `DependencyError` if the database's driver is not installed.
    """
    try:
        url = make_url(uri)
        # PostgreSQL drops idle connections behind firewalls; asking first costs a round trip and no failure.
        engine = create_engine(url, pool_pre_ping=url.get_backend_name() != "sqlite")
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        raise ConfigError(
            f"{_shown(uri)!r} is not the URI of a database: {error}",
            hint="Use sqlite:////absolute/path.db or postgresql+psycopg://user:password@host/name.",
        ) from None
    except ModuleNotFoundError as error:
        raise DependencyError(
            f"The driver of {without_password(uri)} is not installed: {error.name}.",
            hint=f"pip install {error.name}",
            retryable=False,
        ) from None
    if url.get_backend_name() == "sqlite":
        if url.database and url.database != ":memory:":
            _make_folder(Path(url.database).parent)
        event.listen(engine, "connect", _configure_sqlite)
    return engine


@contextmanager
def transaction(engine: Engine) -> Iterator[Connection]:
    """A connection whose work is committed whole when the block ends well, and undone otherwise.

    SQLAlchemy's errors come out as `DependencyError`. After one of them the outcome of a commit is unknown if the
    connection broke during it: whoever cares has to read again.
    """
    try:
        with engine.begin() as connection:
            yield connection
    except SQLAlchemyError as error:
        cause = str(getattr(error, "orig", None) or error).splitlines()[0]
        raise DependencyError(
            f"The database {engine.url.render_as_string(hide_password=True)} failed: {cause}",
            hint="Check that it runs, that its disk has room, and that nobody holds a lock on it.",
        ) from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DependencyError(
            f"The folder {folder} for a database cannot be created: {error.strerror}.",
            hint="Check FLYWHEEL_HOME and its permissions.",
            retryable=False,
        ) from None


def _configure_sqlite(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={_BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _shown(uri: str) -> str:
    """`uri` up to where a password could stand; it could not be parsed, so nothing better is known."""
    return uri.rpartition("@")[2] if "@" in uri else uri
