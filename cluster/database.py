"""One way to open a SQL database: SQLite on a laptop, PostgreSQL by URI, the same SQLAlchemy code above it.

This module knows SQLAlchemy and psycopg, how their errors are told apart, and that no text it makes may show a
password. It must not know which tables stand in a database, nor what they mean.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, quote_plus

from sqlalchemy import Connection, Engine, MetaData, create_engine, event, inspect
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.schema import CreateTable

from cluster.errors import ConfigError, DependencyError

_BUSY_TIMEOUT_MS: Final = 20_000

# A dead host, a network that swallows packets, a writer that froze with a lock: each gets a verdict in seconds.
# Whatever the URI says itself comes first.
_POSTGRES: Final[Mapping[str, str | int]] = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
    "fallback_application_name": "flywheel",
    "options": f"-c lock_timeout={_BUSY_TIMEOUT_MS} -c idle_in_transaction_session_timeout={_BUSY_TIMEOUT_MS // 2}",
}
_SECRETS: Final = ("password", "sslpassword")
"""Arguments of libpq's that may stand in the query."""
_ESCAPES: Final = "In a user's name or password write %40 for '@', %2F for '/', %3A for ':', %25 for '%'."
_FORMS: Final = f"Use sqlite:////absolute/path.db or postgresql://user:password@host/name. {_ESCAPES}"

# What asking again does not mend. A refused login comes without an SQLSTATE, so that its English text has to do;
# under another language it is merely tried again.
_REFUSED_LOGIN: Final = re.compile(r"FATAL:.*(authentication failed|does not exist|pg_hba\.conf|permission denied)")
_REFUSED: Final = ("28", "3D", "3F", "42")
"""Classes of SQLSTATE: who may log in, unknown database, unknown schema, wrong statement or no right to it."""


def sqlite_uri(path: Path) -> str:
    """The SQLAlchemy URI of the SQLite file at `path` (absolute)."""
    return URL.create("sqlite", database=str(path.absolute())).render_as_string()


def sqlite_path(uri: str) -> Path | None:
    """The file of an SQLite database; None for every other kind of database."""
    url = _parse(uri)
    return Path(url.database) if _is_sqlite_file(url) and url.database else None


def uri_for_others(uri: str) -> str:
    """`uri` for a library that opens the database itself: with our driver, and our patience for PostgreSQL."""
    url = _parse(uri)
    patience = {name: str(value) for name, value in _postgres_arguments(url).items() if name != "options"}
    return url.update_query_dict(patience).render_as_string(hide_password=False)


def without_password(uri: str) -> str:
    """`uri` as it may be shown and logged. Of one that cannot be read, only the first word."""
    try:
        return _rendered(_parse(uri))
    except ConfigError:
        return _shown(uri)


def scrub(text: str, uri: str) -> str:
    """`text` of a library that was given `uri`, as it may be shown: without its passwords, however they are written."""
    try:
        url = _parse(uri)
    except ConfigError:
        return text
    named = [url.query.get(name) for name in _SECRETS]
    for secret in {url.password, *(each for each in named if isinstance(each, str))}:
        for written in {secret, quote(secret, safe=""), quote(secret), quote_plus(secret)} if secret else ():
            text = text.replace(written, "***")
    return text


def open_engine(uri: str) -> Engine:
    """A pool of connections to the database at `uri`; nothing is connected before the first use.

    SQLite runs with a write-ahead log and full synchronisation: a committed transaction survives the death of
    the process and of the machine, and readers do not wait for the writer. PostgreSQL does as its server is set
    (`fsync` and `synchronous_commit`, both on unless somebody turned them off).
    `ConfigError` for a URI that cannot be used, `DependencyError` if the database's driver is not installed.
    """
    url = _parse(uri)
    # An engine shows its URL in every log and traceback, and hides nothing among the query's arguments.
    secrets = {name: value for name, value in url.query.items() if name in _SECRETS}
    url = url.difference_update_query(_SECRETS)
    try:
        # PostgreSQL drops idle connections behind firewalls; asking first costs a round trip and no failure.
        engine = create_engine(
            url, pool_pre_ping=not _is_sqlite(url), connect_args={**_postgres_arguments(url), **secrets}
        )
    except (ArgumentError, ValueError):
        raise ConfigError(f"{_shown(uri)!r} is not the URI of a database.", hint=_FORMS) from None
    except ModuleNotFoundError as error:
        raise DependencyError(
            f"The driver of {without_password(uri)} is not installed: {error.name}.",
            hint=f"pip install {error.name}",
            retryable=False,
        ) from None
    if _is_sqlite(url):
        if _is_sqlite_file(url) and url.database:
            _make_folder(Path(url.database).parent)
        event.listen(engine, "connect", _configure_sqlite)
    return engine


@contextmanager
def transaction(engine: Engine) -> Iterator[Connection]:
    """A connection whose work is committed whole when the block ends well, and undone otherwise.

    SQLAlchemy's errors come out as `DependencyError`: worth another attempt unless the database refused for good.
    After one of them the outcome of a commit is unknown if the connection broke during it: whoever cares has to
    read again.
    """
    try:
        with engine.begin() as connection:
            yield connection
    except SQLAlchemyError as error:
        raise _translated(engine, error) from error


def _parse(uri: str) -> URL:
    """`uri` as SQLAlchemy understands it, with our driver; `ConfigError` without a word of a password otherwise."""
    try:
        url = make_url(uri)
        if url.drivername in ("postgres", "postgresql"):
            url = url.set(drivername="postgresql+psycopg")
        url.get_dialect()
    except NoSuchModuleError:
        raise ConfigError(
            f"{_shown(uri)!r} is not the URI of a database: there is no database of that kind.", hint=_FORMS
        ) from None
    except (ArgumentError, ValueError):
        # Neither says more than that; a ValueError repeats what stands where a port should, which may be a password.
        raise ConfigError(f"{_shown(uri)!r} is not the URI of a database.", hint=_FORMS) from None
    if "@" in (url.host or ""):
        raise ConfigError(
            f"{_shown(uri)!r} is not the URI of a database: it has more than one '@'.",
            hint=_ESCAPES,
        )
    return url


def _postgres_arguments(url: URL) -> dict[str, str | int]:
    if url.get_driver_name() != "psycopg":
        return {}
    return {name: value for name, value in _POSTGRES.items() if name not in url.query}


def _translated(engine: Engine, error: SQLAlchemyError) -> DependencyError:
    orig = getattr(error, "orig", None)
    cause = (str(orig or error).strip().splitlines() or [type(orig or error).__name__])[0]
    if _is_sqlite(engine.url):
        hint, retryable = "Check that its disk has room and that nobody holds a lock on it.", True
    elif (getattr(orig, "sqlstate", None) or "")[:2] in _REFUSED or _REFUSED_LOGIN.search(str(orig)):
        hint, retryable = "Check the URI's user, password and database, and the rights of that user.", False
    else:
        hint, retryable = f"Check that it runs and answers at {_address(engine.url)}, and that its disk has room.", True
    return DependencyError(f"The database {_rendered(engine.url)} failed: {cause}", hint=hint, retryable=retryable)


def _is_sqlite(url: URL) -> bool:
    return url.get_backend_name() == "sqlite"


def _is_sqlite_file(url: URL) -> bool:
    return _is_sqlite(url) and bool(url.database) and url.database != ":memory:"


def create_tables(engine: Engine, schema: MetaData, fill: Callable[[Connection], None] = lambda _: None) -> None:
    """Create the tables of `schema` that do not exist yet, and `fill` them with what has to be there from the start.

    `fill` runs in the same transaction, on tables that were there before too. Several first starts at once are no
    trouble.
    """
    try:
        _create_missing(engine, schema, fill)
    except DependencyError:
        # PostgreSQL let one of several through: it has created everything. Or the database really fails, and says
        # so here.
        _create_missing(engine, schema, fill)


def _create_missing(engine: Engine, schema: MetaData, fill: Callable[[Connection], None]) -> None:
    with transaction(engine) as connection:
        # Looked for first: PostgreSQL asks for the right to create tables even where there is nothing to create.
        there = set(inspect(connection).get_table_names())
        for table in schema.sorted_tables:
            if table.name not in there:
                connection.execute(CreateTable(table, if_not_exists=True))
        fill(connection)


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


def _address(url: URL) -> str:
    host = url.host or url.query.get("host") or "its local socket"
    return f"{host}:{url.port}" if url.port else str(host)


def _rendered(url: URL) -> str:
    return url.difference_update_query(_SECRETS).render_as_string(hide_password=True)


def _shown(uri: str) -> str:
    """The first word of what could not be parsed: what comes behind it may be a password."""
    word = re.match(r"[\w+.-]*", uri)
    return f"{word.group() if word else ''}…"
