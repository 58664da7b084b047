"""Writing to the registry from the command line: through its actor, the only writer."""

from collections.abc import Iterator
from contextlib import contextmanager

from actors.registry.client import RegistryClient
from cluster.session import connect
from cluster.storage import Home

_MIRROR_WAIT_S = 10.0


@contextmanager
def writer(home: Home) -> Iterator[RegistryClient]:
    """The registry actor, on the running cluster or on one that lives as long as the block."""
    with connect():
        registry = RegistryClient.start(home)
        yield registry
        # Our own cluster ends here; MLflow should show what was just done, but nobody waits long for a mirror.
        registry.wait_mirrored(_MIRROR_WAIT_S)
