"""The registry's state straight from its log, for someone who only looks: no Ray, no part in writing."""

from actors.registry.state import State, replay
from actors.registry.store import read_log
from cluster import environment
from cluster.database import sqlite_uri
from cluster.storage import Home


def read_state(home: Home) -> State:
    """All that the registry of `home` knows; nothing, if it has never been started.

    Its log is where `FLYWHEEL_DATABASE_URI` says, or in `home`. Errors are those of `store.read_log`.
    """
    return replay(read_log(environment.database_uri() or sqlite_uri(home.registry_database)))
