"""Who owns the Milvus Lite server: one named actor, which starts it, says where it is, and restarts it.

The actor knows one process and one data folder. It speaks no Milvus; `cluster.vectors.milvus` does.
"""

import json
import logging
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import psutil

from cluster.errors import DependencyError
from cluster.session import NAMESPACE
from cluster.storage import Home
from cluster.vectors import lite_process
from cluster.vectors.milvus import MilvusVectors

logger = logging.getLogger(__name__)

ACTOR_NAME: Final = "vectors"
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = lite_process.STOP_LIMIT_S + 2.0
_LOCATE_TIMEOUT_S = 90.0
_SERVER_SETTINGS: Final = {
    # Rows go from the table in memory into an indexed file at this size. Lite converts the whole table at every
    # search, so its own 128 MiB make a search of 2,000 fresh rows ten times slower (169 ms against 16 ms).
    "MILVUS_LITE_MEMTABLE_MEMORY_LIMIT_BYTES": str(512 << 10),
}


class MilvusLiteServer:
    """Owner of one Milvus Lite server over one data folder, on the loopback address of its machine.

    The server is a child process with a lifeline: however this object's process ends, it ends too. A data
    folder that another process holds is waited for at most `lock_wait_s`.
    """

    def __init__(self, data_dir: str, log_path: str, *, lock_wait_s: float = 15.0) -> None:
        self._data_dir = Path(data_dir).absolute()
        self._log_path = Path(log_path)
        self._lock_wait_s = lock_wait_s
        self._process: subprocess.Popen[bytes] | None = None
        self._uri = ""

    def uri(self) -> str:
        """Address of the server; started first if it does not run. After a restart the port is another.

        Raises `DependencyError` if it cannot be started, or if another process uses the data folder.
        """
        if self._process is None or self._process.poll() is not None:
            if self._process is not None:
                logger.warning("Milvus Lite ended with code %s; starting it again", self._process.returncode)
            self._start()
        return self._uri

    def pid(self) -> int | None:
        """Process id of the server, if it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def stop(self) -> None:
        """End the server and wait for it; the next `uri()` starts it again."""
        if self._process is not None:
            _end(self._process)
            self._process = None

    def _start(self) -> None:
        self._data_dir.mkdir(parents=True, exist_ok=True)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + self._lock_wait_s
        while True:
            process = self._spawn()
            facts = self._first_report(process)
            if not facts.get("locked"):
                self._process, self._uri = process, f"http://127.0.0.1:{facts['port']}"
                return
            process.wait()
            # The server of an owner that has just died needs a moment to close; one that hangs is ended.
            others = self._holders()
            if time.monotonic() > deadline:
                orphans = [other for other in others if not _owner_lives(other)]
                if not orphans:
                    raise DependencyError(
                        f"Another process uses the vector store in {self._data_dir}"
                        + (f": pid {others[0].pid}." if others else "."),
                        hint="Stop the other Flywheel of this FLYWHEEL_HOME, or give this one another home.",
                        retryable=False,
                    )
                for orphan in orphans:
                    logger.warning("ending the orphaned Milvus Lite server with pid %s", orphan.pid)
                    orphan.kill()
                deadline = time.monotonic() + self._lock_wait_s
            time.sleep(0.5)

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                # -P: the folder of the file holds modules named like others'.
                [
                    sys.executable,
                    "-P",
                    lite_process.__file__,
                    "--data-dir",
                    str(self._data_dir),
                    "--owner",
                    _identity(),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**_SERVER_SETTINGS, **os.environ},
                # Its own group: Ctrl-C in a terminal reaches the owner, and the owner ends the server.
                process_group=0,
            )

    def _first_report(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        line = _read_line(process, time.monotonic() + _START_TIMEOUT_S)
        if line:
            facts: dict[str, Any] = json.loads(line)
            return facts
        _end(process)
        raise DependencyError(
            f"Milvus Lite did not start (exit code {process.returncode}).",
            hint=f"Its log is {self._log_path}.",
        )

    def _holders(self) -> list[psutil.Process]:
        """Servers that Flywheel started over this very folder, ours or a previous owner's."""
        marks = (lite_process.__file__, str(self._data_dir))
        own = os.getpid()
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if process.pid != own and all(mark in (process.info["cmdline"] or []) for mark in marks)
        ]


def lite_server(home: Home) -> Any:
    """Handle of the cluster's one `MilvusLiteServer` actor, started if there is none.

    It stays on the machine that first asked for it, where the data folder is.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return (
        ray.remote(MilvusLiteServer)
        .options(
            name=ACTOR_NAME,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=-1,
            num_cpus=0,
            scheduling_strategy=here,
        )
        .remote(str(home.vectors), str(home.logs / "milvus-lite.log"))
    )


def open_store(
    uri: str | None, home: Home, *, max_batch_bytes: int = 3 << 20, consistency_level: str = "Strong"
) -> MilvusVectors:
    """The store at `uri`; without one, Milvus Lite under `home`, owned by an actor of the running Ray."""
    if uri is not None:
        return MilvusVectors(uri, max_batch_bytes=max_batch_bytes, consistency_level=consistency_level)

    def locate() -> str:
        import ray

        # By name each time: a handle does not survive the actor's final death and new start.
        try:
            return str(ray.get(lite_server(home).uri.remote(), timeout=_LOCATE_TIMEOUT_S))
        except ray.exceptions.RayTaskError as error:
            # Ray's combined exception has the class attributes of ours, not its facts.
            raise (error.cause if isinstance(error.cause, DependencyError) else error) from None
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            raise DependencyError(f"The actor that owns Milvus Lite does not answer: {error}") from None

    return MilvusVectors(locate, max_batch_bytes=max_batch_bytes, consistency_level=consistency_level)


def _identity() -> str:
    """This process as pid and start time: a pid alone may be given to another process later."""
    return f"{os.getpid()}:{psutil.Process().create_time():.2f}"


def _owner_lives(server: psutil.Process) -> bool:
    arguments = server.info["cmdline"]
    pid, started = arguments[arguments.index("--owner") + 1].split(":")
    try:
        return bool(f"{psutil.Process(int(pid)).create_time():.2f}" == started)
    except psutil.NoSuchProcess:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close the lifeline, which stops the server in order; kill it if that takes too long."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(timeout=_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _read_line(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """First line of the process's standard output; empty if it ended or the time is over before."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            return b""
        chunk = os.read(descriptor, 4096)
        if not chunk:
            return b""
        line += chunk
    return line
