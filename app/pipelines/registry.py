"""The registry from the command line: reading straight from its log, writing through its actor."""

from collections.abc import Iterator
from contextlib import contextmanager

from actors.registry.client import RegistryClient
from actors.registry.state import State, replay
from actors.registry.store import read_log
from cluster.database import sqlite_uri
from cluster.session import connect
from cluster.storage import Home


def read_state(home: Home) -> State:
    """All that the registry of `home` knows. It takes no part in writing, and needs no Ray."""
    if not home.registry_database.exists():
        return State()
    return replay(read_log(sqlite_uri(home.registry_database)))


@contextmanager
def writer(home: Home) -> Iterator[RegistryClient]:
    """The registry actor, on the running cluster or on one that lives as long as the block."""
    with connect():
        yield RegistryClient.start(home)
