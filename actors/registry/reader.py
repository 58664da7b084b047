"""The registry's state straight from its log, for someone who only looks: no Ray, no part in writing."""

from actors.registry.state import State, replay
from actors.registry.store import read_log
from cluster.database import sqlite_uri
from cluster.storage import Home


def read_state(home: Home) -> State:
    """All that the registry of `home` knows; nothing, if it has never been started."""
    if not home.registry_database.exists():
        return State()
    return replay(read_log(sqlite_uri(home.registry_database)))
