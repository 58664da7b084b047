"""Writing to the registry from the command line: through its actor, the only writer."""

from collections.abc import Iterator
from contextlib import contextmanager

from actors.registry.client import RegistryClient
from app.session import connected
from cluster.storage import Home

_MIRROR_WAIT_S = 10.0


@contextmanager
def mirrored(home: Home) -> Iterator[RegistryClient]:
    """The registry actor on the connected Ray; a block that ends well leaves MLflow showing what it did.

    The cluster may end right after the block, and MLflow with a lag; but nobody waits long for a mirror.
    """
    registry = RegistryClient.start(home)
    yield registry
    registry.wait_mirrored(_MIRROR_WAIT_S)


@contextmanager
def writer(home: Home) -> Iterator[RegistryClient]:
    """The registry actor, on the running cluster or on one that lives as long as the block."""
    with connected(), mirrored(home) as registry:
        yield registry
