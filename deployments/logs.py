"""Where a replica's own words go, and whose request they are about: Serve's log files, beside Serve's own lines.

    join_serve()                      once in a replica: our loggers write where Serve's does
    with about(request_id): …         every line that is logged inside, by whomever in this process, holds the id

The id stands on the record as `request_id`, Serve's own name for it: Serve's formats show it, in text and in JSON. It
goes with the context: tasks and callbacks that are made inside have it too. Standard library only.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_SERVE = "ray.serve"
_OURS = ("deployments", "actors", "cluster")
_REQUEST: ContextVar[str | None] = ContextVar("flywheel_request", default=None)


@contextmanager
def about(request_id: str) -> Iterator[None]:
    """What is logged inside belongs to this request."""
    token = _REQUEST.set(request_id)
    try:
        yield
    finally:
        _REQUEST.reset(token)


class RequestIdFilter(logging.Filter):
    """Puts the id of the request that is being handled onto each record. It holds no record back."""

    def filter(self, record: logging.LogRecord) -> bool:
        if (request_id := _REQUEST.get()) is not None:
            record.request_id = request_id
        return True


class NoAccessLines(logging.Filter):
    """Holds back Serve's line per request, where our own says more.

    Serve marks it by an attribute (ray 2.60). `enable_access_log=False` would do the same, but a deployment that sets
    it no longer hears the operator's `logging_config`. Delete when the two can be merged.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(record, "serve_access_log", False)


def join_serve(*, own_access_lines: bool = False) -> None:
    """Let our loggers write where Serve's does, in this replica. `own_access_lines`: Serve need not write any.

    Serve gives handlers to its own logger only; what others log from INFO on would be lost.
    """
    serve = logging.getLogger(_SERVE)
    if own_access_lines:
        serve.addFilter(NoAccessLines())
    for handler in serve.handlers:
        # On the handlers, and so on Serve's own lines too: a logger's filter does not see what its children log.
        handler.addFilter(RequestIdFilter())
    for name in _OURS:
        logger = logging.getLogger(name)
        logger.handlers = list(serve.handlers)
        logger.setLevel(logging.INFO)
        logger.propagate = False
