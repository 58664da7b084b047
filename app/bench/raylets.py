"""A Ray cluster of several nodes on one machine, each a process tree that can be lost as a machine is.

For benches and tests of what happens to a run when nodes come and go. The cluster is nobody else's: its own ports,
temp folder and environment, and only what it has started is ever ended.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

_STORE_BYTES: Final = 100_000_000
_START_S: Final = 90.0
# A raylet ends itself when its agents, which import half of Ray, are not up within 15 s, as beside busy cores.
_AGAIN: Final = 'for try in 1 2 3; do "$@"; done; exit 1'
# How soon Ray itself knows that a node is lost: after three refusals of its port, where the stock settings take 15 s.
# One that is merely slow keeps the stock 10 s for an answer. Read by the head at its start.
_NOTICE: Final = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "3",
}


@dataclass(frozen=True)
class Node:
    """One node: the process above `ray start --block`, parent of all that belongs to it."""

    process: subprocess.Popen[bytes]
    log: Path
    ip: str
    """The address that it was given; the head has the machine's own, and here none."""

    def processes(self, title: str = "") -> list[psutil.Process]:
        """All that belongs to it and is alive, whose command line has `title` in it."""
        return [each for each in _tree(self.process) if title in _title(each)]


class Raylets:
    """`with Raylets() as cluster:` a head; nodes are added, and lost."""

    def __init__(self, env: Mapping[str, str] | None = None, *, head_cpus: int = 1) -> None:
        """`env` is added to the environment of every node."""
        self._folder = Path(tempfile.mkdtemp(prefix="fw-rl-", dir="/tmp"))  # Ray's sockets need a short path
        port = _free_port()
        self.address = f"127.0.0.1:{port}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.env = {**kept, **_NOTICE, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", **(env or {})}
        """The environment for a driver, too; it needs RAY_ADDRESS besides."""
        self._nodes: list[Node] = []
        self._added = 0
        self.head = self._start(
            "", {}, "--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self._folder}",
            f"--num-cpus={head_cpus}", f"--ray-client-server-port={_free_port()}",
        )  # fmt: skip
        self.until_up(self.head)

    def add(self, cpus: int = 1, env: Mapping[str, str] | None = None) -> Node:
        """Start one more node, with `env` besides; returns at once, Ray sees it seconds later."""
        # An address of its own: a driver attaches to whichever node has its own address, and that must be the head.
        self._added += 1
        own = f"127.0.0.{1 + self._added}"
        return self._start(
            own, env or {}, f"--address={self.address}", f"--num-cpus={cpus}", f"--node-ip-address={own}"
        )

    def drain(self, node: Node, *, within_s: float) -> None:
        """Tell Ray that the node is taken away in `within_s`, as an autoscaler or a spot market does; ends nothing."""
        subprocess.run(
            [sys.executable, "-m", __name__, self.address, node.ip, str(within_s)], env=self.env, check=True, timeout=60
        )

    def lose(self, node: Node) -> None:
        """The node is gone from one moment to the next, with all its processes."""
        _end(node.process, signal.SIGKILL)
        self._nodes.remove(node)

    def close(self) -> None:
        """End what was started, the last first."""
        for node in reversed(self._nodes):
            _end(node.process, signal.SIGKILL)
        self._nodes.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, ip: str, env: Mapping[str, str], *arguments: str) -> Node:
        log = self._folder / f"node-{len(self._nodes)}-{time.monotonic_ns()}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    "/bin/sh", "-c", _AGAIN, "node", str(Path(sys.executable).parent / "ray"), "start", "--block",
                    "--disable-usage-stats", f"--object-store-memory={_STORE_BYTES}", *arguments,
                ],
                env={**self.env, **env}, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        node = Node(process, log, ip)
        self._nodes.append(node)
        return node

    def until_up(self, node: Node) -> None:
        """Wait until the node says that it has started."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and node.process.poll() is None:
            if b"Ray runtime started" in node.log.read_bytes():
                return
            time.sleep(0.1)
        text = node.log.read_text(errors="replace")
        self.close()
        raise RuntimeError(f"the node did not start:\n{text[-2000:]}")


def _tree(process: subprocess.Popen[bytes]) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(process.pid)
        yield top
        yield from top.children(recursive=True)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _end(process: subprocess.Popen[bytes], sign: signal.Signals) -> None:
    found = list(_tree(process))
    for each in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(sign)
    psutil.wait_procs(found, timeout=10)
    process.wait(timeout=10)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _drain(address: str, ip: str, within_s: float) -> None:
    """What `ray drain-node` does, for the node at `ip`. (The command is hidden, and its node ids need a dashboard.)"""
    import ray
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    client = ray._raylet.GcsClient(address=address)
    nodes = client.get_all_node_info().items()
    (node_id,) = (node_id for node_id, node in nodes if node.node_manager_address == ip and not node.state)
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + within_s) * 1000)
    accepted, why = client.drain_node(node_id.hex(), reason, "taken back by its owner", deadline_ms)
    if not accepted:
        raise RuntimeError(f"the node at {ip} is not drained: {why}")


if __name__ == "__main__":
    _drain(sys.argv[1], sys.argv[2], float(sys.argv[3]))
