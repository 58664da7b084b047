"""What follows a commit on rank 0, in a thread that nobody waits for: the registry hears of it, old ones go.

News wait while the registry is away. Nothing is deleted before the registry has said what must stay.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping

from actors.training.checkpoint import manifest
from actors.training.checkpoint.retention import to_remove
from actors.training.checkpoint.storage import RunStorage
from actors.training.config import CheckpointConfig
from actors.training.job import Position, Protected
from cluster.errors import FlywheelError

logger = logging.getLogger(__name__)

_News = tuple[Position, str, Mapping[str, float]]


class Aftermath:
    """Tells of commits in their order, then removes what the policy does not keep."""

    def __init__(
        self,
        storage: RunStorage,
        run_id: str,
        policy: CheckpointConfig,
        on_commit: Callable[[Position, str, Mapping[str, float]], None] | None,
        protected: Protected | None,
        *,
        retry_s: float = 10.0,
    ) -> None:
        self._storage = storage
        self._run_id = run_id
        self._policy = policy
        self._on_commit = on_commit
        self._protected = protected
        self._retry_s = retry_s
        self._resumed_from: set[int] = set()
        self._untold: deque[_News] = deque()
        self._swept = True
        self._wake = threading.Condition()
        self._working = threading.Lock()
        self._away = False
        threading.Thread(target=self._work, name="checkpoint-aftermath", daemon=True).start()

    def committed(self, position: Position, uri: str, metrics: Mapping[str, float], *, resumed: bool = False) -> None:
        """Take the news of one checkpoint; never waits and never fails."""
        with self._wake:
            if resumed:
                self._resumed_from.add(position.step)
            self._untold.append((position, uri, dict(metrics)))
            self._swept = False
            self._wake.notify()

    def finish(self) -> None:
        """Do what is left now. Raises what the registry raises while it has not heard of everything."""
        with self._working:
            try:
                self._tell()
                self._sweep()
            except FlywheelError as error:
                if self._untold:
                    raise
                logger.warning("checkpoints are not tidied: %s", error)

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: not self._away and not self._swept, timeout=self._retry_s)
            try:
                with self._working:
                    self._tell()
                    self._sweep()
            except FlywheelError as error:
                if not self._away:
                    logger.warning("the registry does not know the last checkpoint yet: %s", error)
                self._away = True
            except Exception:
                # A thread that ended here would let the disk fill up without a word.
                logger.exception("after a checkpoint")
                self._away = True
            else:
                self._away = False

    def _tell(self) -> None:
        while self._untold:
            if self._on_commit is not None:
                try:
                    self._on_commit(*self._untold[0])
                except FlywheelError as error:
                    if error.retryable or len(self._untold) == 1:
                        raise
                    logger.warning("the registry does not take %s: %s", self._untold[0][1], error)
            self._untold.popleft()

    def _sweep(self) -> None:
        if self._swept:
            return
        self._swept = True  # what is committed from here on asks for another one
        try:
            there = manifest.committed(self._storage)
            kept = self._resumed_from | set(self._protected() if self._protected else ())
            for checkpoint in to_remove(there, self._policy, kept):
                self._storage.remove(checkpoint.name)
                logger.info("%s of run %s is removed: newer ones are kept", checkpoint.name, self._run_id)
        except OSError as error:
            logger.warning("an old checkpoint of run %s is not removed: %s", self._run_id, error)
        except BaseException:
            self._swept = False
            raise
