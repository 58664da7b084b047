"""Where a replica's own words go: into Serve's log files, beside Serve's. It knows logging and nothing else."""

import logging

_SERVE = "ray.serve"
_OURS = ("deployments", "actors", "cluster")


def join_serve() -> None:
    """Let our loggers write where Serve's does, in this replica.

    Serve gives handlers to its own logger only; what others log from INFO on would be lost.
    """
    serve = logging.getLogger(_SERVE)
    for name in _OURS:
        logger = logging.getLogger(name)
        logger.handlers = list(serve.handlers)
        logger.setLevel(logging.INFO)
        logger.propagate = False
