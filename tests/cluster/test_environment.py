"""Where databases are: a setting that is read in one place, and reaches no worker's environment."""

import pytest

from cluster import environment
from cluster.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("FLYWHEEL_DATABASE_URI", environment.database_uri),
        ("FLYWHEEL_TRACKING_URI", environment.tracking_uri),
    ],
)
def test_the_uri_of_a_database(name: str, read: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(read)
    assert read() is None
    monkeypatch.setenv(name, " ")
    assert read() is None
    monkeypatch.setenv(name, "postgresql://ada:s3cret@db/x ")
    assert read() == "postgresql://ada:s3cret@db/x"
    # Ray shows a worker's environment in its dashboard.
    assert "s3cret" not in str(environment.for_workers())
    monkeypatch.setenv(name, "sqlite:///here.db")
    with pytest.raises(ConfigError, match=f"{name}=sqlite:///here.db is not an absolute path"):
        read()
