"""The registry's state straight from its log, for someone who only looks: no Ray, no part in writing."""

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Engine

from actors.registry.serving import Holding, KeyUse, Traffic, read_key_use, read_serving
from actors.registry.state import State, replay
from actors.registry.store import read_log
from cluster import environment
from cluster.database import open_engine, sqlite_path, sqlite_uri
from cluster.storage import Home

_Read = TypeVar("_Read")


def read_state(home: Home) -> State:
    """All that the registry of `home` knows; nothing, if it has never been started.

    Its log is where `FLYWHEEL_DATABASE_URI` says, or in `home`. Errors are those of `store.read_log`.
    """
    return replay(read_log(_database(home)))


def read_reports(home: Home) -> tuple[list[Holding], list[Traffic]]:
    """What servers have reported to the registry of `home`: which replicas hold what, and the traffic by hour."""
    nothing: tuple[list[Holding], list[Traffic]] = ([], [])
    return _read(home, read_serving, nothing)


def read_uses(home: Home) -> list[KeyUse]:
    """What the API keys of `home` were charged, by key and hour."""
    return _read(home, read_key_use, [])


def _read(home: Home, read: Callable[[Engine], _Read], nothing: _Read) -> _Read:
    uri = _database(home)
    file = sqlite_path(uri)
    if file is not None and not file.exists():
        return nothing
    engine = open_engine(uri)
    try:
        return read(engine)
    finally:
        engine.dispose()


def _database(home: Home) -> str:
    return environment.database_uri() or sqlite_uri(home.registry_database)
