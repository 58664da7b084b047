"""`flywheel serve`: bring the Serve application up on the connected Ray, and down again."""

from collections.abc import Iterator
from contextlib import contextmanager

from ray import serve

from actors.registry.client import RegistryClient
from actors.registry.reader import read_state
from actors.registry.state import snapshot
from cluster.config import parse
from cluster.progress import Progress, Sink
from cluster.session import require_free_port
from cluster.storage import Home
from deployments import application, registered
from deployments.config import ServeConfig


def resolved(config: ServeConfig, home: Home) -> ServeConfig:
    """`config` with the files of each registered version that an `llm.model` or an `embedding.model` names."""
    if not any([*map(registered.may_be, config.llm), *map(registered.may_be, config.embedding)]):
        return config
    known = snapshot(read_state(home), root=home.versions)
    found = {
        "llm": tuple(registered.resolved(base, known) for base in config.llm),
        "embedding": tuple(registered.resolved(embedder, known) for embedder in config.embedding),
    }
    # Parsed again: only now it is known which names they are served by, and that these differ.
    return parse(ServeConfig, {**dict(config), **found}, source="The serve section")


def deploy(config: ServeConfig, home: Home, sink: Sink) -> str:
    """Start the application, or update it; returns its URL once it answers. It stays when we return."""
    if not serve.status().proxies:
        require_free_port(config.gateway.host, config.gateway.port)
    RegistryClient.start(home)
    sink(Progress("serve", 0, unit="parts", note="the engine takes half a minute"))
    return application.run(config)


@contextmanager
def running(config: ServeConfig, home: Home, sink: Sink) -> Iterator[str]:
    """The application's URL, for as long as the block runs."""
    try:
        yield deploy(config, home, sink)
    finally:
        application.stop()
