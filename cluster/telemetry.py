"""Where log lines of a command go: into a file under FLYWHEEL_HOME, so that the terminal belongs to the person.

Workers and replicas log where Ray puts them (its session folder); this is about the process of the command line.
`count` is for all of them: what rarely happens and must not be overlooked.
"""

import io
import logging
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from typing import Any

from cluster.storage import Home

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_MAX_BYTES = 10 << 20
_KEPT = 3
_NAME = "flywheel-file"

_counters: dict[str, Any] = {}
_counters_lock = threading.Lock()


def log_to_file(home: Home) -> None:
    """Send this process's log to `home.logs`/flywheel.log and take every logger off the terminal.

    Call it again after heavy imports: ray.serve.llm puts its own handler on the root logger when it is imported
    (ray 2.60), and Ray's parts bring handlers of their own.
    """
    root = logging.getLogger()
    ours = next((handler for handler in root.handlers if handler.get_name() == _NAME), None)
    if ours is None:
        home.logs.mkdir(parents=True, exist_ok=True)
        ours = RotatingFileHandler(home.logs / "flywheel.log", maxBytes=_MAX_BYTES, backupCount=_KEPT, delay=True)
        ours.set_name(_NAME)
        ours.setFormatter(logging.Formatter(_FORMAT))
    for name in ("", *logging.root.manager.loggerDict):
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.stdout):
                logger.removeHandler(handler)
                logger.propagate = True
    if ours not in root.handlers:
        root.addHandler(ours)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)


class PrintsToLog(io.TextIOBase):
    """A stream for what libraries print: each line goes to the log. Use with `contextlib.redirect_stdout`."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if line.strip():
                self._logger.info("%s", line)
        return len(text)


@contextmanager
def quiet_imports(home: Home) -> Iterator[None]:
    """For importing libraries that write to the terminal while they are imported (ray.serve.llm, vllm)."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
    log_to_file(home)


def count(name: str, description: str, labels: Mapping[str, str]) -> None:
    """Add one to a counter that Ray exports beside its own metrics, as `<name>_total`; nothing where no Ray runs.

    A counter has the same label names at every call. Their values have to be few: each is a time series.
    """
    ray = sys.modules.get("ray")  # whoever has not imported it is not connected to it
    if ray is None or not ray.is_initialized():
        return
    from ray.util.metrics import Counter

    with _counters_lock:
        counter = _counters.get(name)
        if counter is None:
            counter = _counters[name] = Counter(name, description, tag_keys=tuple(labels))
    counter.inc(tags=dict(labels))
