"""`flywheel serve`: bring the Serve application up on the connected Ray, and down again."""

from collections.abc import Iterator
from contextlib import contextmanager

from ray import serve

from actors.registry.client import RegistryClient
from actors.registry.reader import read_state
from actors.registry.state import snapshot
from cluster.progress import Progress, Sink
from cluster.session import require_free_port
from cluster.storage import Home
from deployments import application
from deployments.config import ServeConfig
from deployments.llm import registered


def resolved(config: ServeConfig, home: Home) -> ServeConfig:
    """`config` with the files of the registered whole model that `llm.model` names, if it names one."""
    if config.llm is None or not registered.may_be(config.llm):
        return config
    known = snapshot(read_state(home), root=home.versions)
    return config.model_copy(update={"llm": registered.resolved(config.llm, known)})


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
