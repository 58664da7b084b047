import logging
import time
import traceback
from pathlib import Path
from urllib.parse import quote

import pytest
from sqlalchemy import text

from cluster.database import open_engine, scrub, sqlite_path, sqlite_uri, transaction, uri_for_others, without_password
from cluster.errors import ConfigError, DependencyError
from tests.postgres import PASSWORD, USER, Postgres, Proxy, free_port


def test_a_committed_row_is_on_disk_before_the_commit_returns(tmp_path: Path) -> None:
    engine = open_engine(sqlite_uri(tmp_path / "deep" / "a.db"))
    with transaction(engine) as connection:
        # 2 is FULL: SQLite's own default under a write-ahead log may lose the last commits with the machine.
        assert connection.execute(text("PRAGMA synchronous")).scalar_one() == 2
        assert connection.execute(text("PRAGMA journal_mode")).scalar_one() == "wal"


def test_a_block_that_fails_leaves_nothing(tmp_path: Path) -> None:
    engine = open_engine(sqlite_uri(tmp_path / "a.db"))
    with transaction(engine) as connection:
        connection.execute(text("CREATE TABLE t (x INTEGER PRIMARY KEY)"))

    def insert_then_fail(second: str) -> None:
        with transaction(engine) as connection:
            connection.execute(text("INSERT INTO t VALUES (1)"))
            connection.execute(text(second))
            raise KeyError

    with pytest.raises(KeyError):
        insert_then_fail("INSERT INTO t VALUES (2)")
    with pytest.raises(DependencyError, match="UNIQUE"):
        insert_then_fail("INSERT INTO t VALUES (1)")
    with transaction(engine) as connection:
        assert connection.execute(text("SELECT count(*) FROM t")).scalar_one() == 0


def test_a_file_that_is_no_database_is_named_in_the_error(tmp_path: Path) -> None:
    path = tmp_path / "letter.db"
    path.write_text("Dear all, this is not a database, but it is long enough to be looked at. " * 20)
    engine = open_engine(sqlite_uri(path))
    with pytest.raises(DependencyError, match=r"letter\.db failed: file is not a database"), transaction(engine):
        pass


@pytest.mark.parametrize("uri", ["not a uri", "carrier-pigeon://home/x"])
def test_a_wrong_uri_is_the_users_to_mend(uri: str) -> None:
    with pytest.raises(ConfigError, match="is not the URI of a database"):
        open_engine(uri)


def test_a_missing_driver_is_named_and_the_password_is_not() -> None:
    with pytest.raises(DependencyError) as caught:
        open_engine("postgresql+pg8000://ada:secret@db/flywheel")
    assert "pg8000" in str(caught.value)
    assert "secret" not in f"{caught.value} {caught.value.hint}"
    assert without_password("postgresql+psycopg://ada:secret@db/x") == "postgresql+psycopg://ada:***@db/x"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DependencyError, match="cannot be created") as caught:
        open_engine(sqlite_uri(tmp_path / "file" / "a.db"))
    assert not caught.value.retryable


@pytest.mark.parametrize(
    "uri",
    [
        "postgresql://ada:s3cr@et@host/db",
        "postgresql://ada:s3cr@et:s3cret@host/db",
        "postgresql//ada:s3cret@host/db",
        "host=db user=ada password=s3cret",
        "s3cret@host",
        "carrier-pigeon://ada:s3cret@host/db",
    ],
)
def test_a_uri_that_cannot_be_used_is_refused_without_its_password(uri: str) -> None:
    with pytest.raises(ConfigError, match="is not the URI of a database") as caught:
        open_engine(uri)
    everything = "".join(traceback.format_exception(caught.value)) + str(caught.value.hint) + without_password(uri)
    for piece in ("s3cr@", "s3cret@", "=s3cret", "et@host"):
        assert piece not in everything


def test_a_password_that_stands_among_the_arguments_is_not_shown_either() -> None:
    uri = "postgres://ada@db/x?password=s3cret&sslpassword=s3cret&sslmode=require"
    engine = open_engine(uri)
    assert "s3cret" not in f"{engine!r} {engine.url!r} {without_password(uri)}"
    assert without_password(uri) == "postgresql+psycopg://ada@db/x?sslmode=require"
    assert scrub("could not use 's3cret'", uri) == "could not use '***'"
    _, arguments = engine.dialect.create_connect_args(engine.url)
    assert arguments["sslmode"] == "require"


def test_what_the_uri_says_of_a_connection_comes_before_our_patience() -> None:
    ours = uri_for_others("postgresql://db/x")
    assert ours.startswith("postgresql+psycopg://db/x?")
    assert "connect_timeout=5" in ours
    assert "connect_timeout=2" in uri_for_others("postgresql://db/x?connect_timeout=2")
    assert uri_for_others("sqlite:////tmp/x.db") == "sqlite:////tmp/x.db"


def test_the_file_of_a_uri(tmp_path: Path) -> None:
    assert sqlite_path(sqlite_uri(tmp_path / "a.db")) == tmp_path / "a.db"
    assert sqlite_path("sqlite://") is None
    assert sqlite_path("postgresql://db/x") is None


def test_a_server_that_is_not_there_is_worth_another_attempt_and_says_where(tmp_path: Path) -> None:
    port = free_port()
    engine = open_engine(f"postgresql://ada:s3cret@127.0.0.1:{port}/x")
    with pytest.raises(DependencyError, match="refused") as caught, transaction(engine):
        pass
    assert caught.value.retryable
    assert f"127.0.0.1:{port}" in str(caught.value.hint)
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.integration
def test_every_driver_spelling_reaches_the_server_and_its_password_reaches_no_log(
    postgres: Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    said = []
    for driver in ("postgresql", "postgresql+psycopg", "postgres"):
        uri = postgres.uri("postgres", driver=driver)
        engine = open_engine(uri)
        with transaction(engine) as connection:
            assert connection.execute(text("SELECT current_user")).scalar_one() == USER
            assert connection.execute(text("SELECT current_setting('application_name')")).scalar_one() == "flywheel"
            said.append(repr(connection.connection.driver_connection))
        with pytest.raises(DependencyError, match="does not exist") as caught, transaction(engine) as connection:
            connection.execute(text("SELECT * FROM nowhere"))
        assert not caught.value.retryable
        said += [repr(engine), *traceback.format_exception(caught.value), str(caught.value.hint)]
    everything = caplog.text + "".join(said)
    for written in (PASSWORD, quote(PASSWORD, safe=""), quote(PASSWORD)):
        assert written not in everything


@pytest.mark.integration
@pytest.mark.parametrize("wrong", ["password", "database"])
def test_a_login_that_is_refused_is_not_worth_another_attempt(postgres: Postgres, wrong: str) -> None:
    uri = postgres.uri("nowhere") if wrong == "database" else f"postgresql://ada:s3cret@127.0.0.1:{postgres.port}/x"
    engine = open_engine(uri)
    with pytest.raises(DependencyError, match=r"does not exist|authentication failed") as caught, transaction(engine):
        pass
    assert not caught.value.retryable
    assert "user, password and database" in str(caught.value.hint)


@pytest.mark.integration
def test_what_another_attempt_can_mend_is_retryable(postgres: Postgres) -> None:
    engine = open_engine(postgres.uri(postgres.create_database()))
    with transaction(engine) as connection:
        connection.execute(text("CREATE TABLE t (x INTEGER PRIMARY KEY)"))
        connection.execute(text("INSERT INTO t VALUES (1), (2)"))
    serializable = engine.execution_options(isolation_level="SERIALIZABLE")

    def meet() -> None:
        with transaction(serializable) as one, transaction(serializable) as other:
            for each in (one, other):
                each.execute(text("INSERT INTO t SELECT sum(x) + :own FROM t"), {"own": 1 if each is one else 2})

    with pytest.raises(DependencyError, match="serialize") as caught:
        meet()
    assert caught.value.retryable
    with pytest.raises(DependencyError, match="terminating connection") as caught, transaction(engine) as connection:
        connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
    assert caught.value.retryable


@pytest.mark.integration
def test_a_host_that_swallows_everything_gets_its_verdict_in_seconds(postgres: Postgres) -> None:
    proxy = Proxy(postgres.port)
    proxy.freeze()
    started = time.monotonic()
    engine = open_engine(f"{postgres.uri('postgres', port=proxy.port)}?connect_timeout=2")
    with pytest.raises(DependencyError, match="timeout") as caught, transaction(engine):
        pass
    assert time.monotonic() - started < 5
    assert caught.value.retryable
    proxy.close()
