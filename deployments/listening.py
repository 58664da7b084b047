"""Where the cluster's Serve listens. Private parts of ray 2.60.0: this file alone knows them.

Serve listens where its first application asked it to; whoever asks for another address later is told of it in a log
line only, and then finds nobody there. Delete when `serve.status()` says the address.
"""

from ray import serve
from ray.serve.context import _get_global_client

from cluster.errors import ConfigError


def require(host: str, port: int) -> None:
    """`ConfigError` if the Serve that runs on the connected Ray listens elsewhere than at `host:port`."""
    if not serve.status().proxies:
        return
    options = _get_global_client().http_config
    if (options.host, options.port) != (host, port):
        raise ConfigError(
            f"gateway: {host}:{port} is not where Serve listens on this cluster: it runs already, "
            f"at {options.host}:{options.port}.",
            hint="Set gateway.host and gateway.port to that address, or end Serve and all it runs "
            "with `serve shutdown` first.",
        )
