"""Writing to the registry from the command line: through its actor, the only writer."""

from collections.abc import Iterator
from contextlib import contextmanager

from actors.registry.client import RegistryClient
from cluster.session import connect
from cluster.storage import Home


@contextmanager
def writer(home: Home) -> Iterator[RegistryClient]:
    """The registry actor, on the running cluster or on one that lives as long as the block."""
    with connect():
        yield RegistryClient.start(home)
