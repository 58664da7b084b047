from pathlib import Path

import pytest
from sqlalchemy import text

from cluster.database import open_engine, sqlite_uri, transaction, without_password
from cluster.errors import ConfigError, DependencyError


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
