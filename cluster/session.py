"""The Ray cluster that a command works on: one that runs already, or our own for as long as we need it.

Flywheel starts Ray in-process only when nobody names a cluster; what it started, it stops.
"""

import json
import logging
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster import environment, haproxy
from cluster.errors import ConfigError, DependencyError
from cluster.storage import Home, write_atomically
from cluster.telemetry import log_to_file

NAMESPACE = "flywheel"
_ANSWER_WAIT_S = 5.0


@dataclass(frozen=True)
class Session:
    """A connection to Ray. `owned` says whether ending the session ends the cluster."""

    address: str
    owned: bool
    dashboard_url: str | None


@dataclass(frozen=True)
class Beacon:
    """What a kept session leaves for other commands under `FLYWHEEL_HOME`: where Ray and the gateway are."""

    address: str
    gateway_url: str | None
    dashboard_url: str | None
    pid: int

    @staticmethod
    def path(home: Home) -> Path:
        return home.root / "session.json"

    @classmethod
    @contextmanager
    def lit(cls, home: Home, *, address: str, gateway_url: str | None, dashboard_url: str | None) -> "Iterator[Beacon]":
        """The beacon of this process, for as long as the block runs."""
        beacon = cls(address, gateway_url, dashboard_url, os.getpid())
        write_atomically(cls.path(home), json.dumps(asdict(beacon), indent=2) + "\n")
        try:
            yield beacon
        finally:
            cls.path(home).unlink(missing_ok=True)

    @classmethod
    def read(cls, home: Home) -> "Beacon | None":
        """The beacon of a live process; a beacon whose process is gone is removed."""
        try:
            beacon = cls(**json.loads(cls.path(home).read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return None
        if Path(f"/proc/{beacon.pid}").exists():
            return beacon
        cls.path(home).unlink(missing_ok=True)
        return None


@contextmanager
def connect(address: str | None = None, *, start: bool = True, num_cpus: int | None = None) -> Iterator[Session]:
    """Attach to Ray at `address`, else `RAY_ADDRESS`, else a kept session, else start our own.

    Raises `DependencyError` if a named cluster does not answer, or if none is found and `start` is false.
    """
    import ray  # heavy; nothing before this line needs it
    from ray.exceptions import RayError

    home = Home.current()
    log_to_file(home)
    if ray.is_initialized():
        yield Session(ray.get_runtime_context().gcs_address, owned=False, dashboard_url=None)
        return
    target = address or os.environ.get(environment.RAY_ADDRESS)
    if target is None and (beacon := Beacon.read(home)) is not None:
        target = beacon.address
    if target is None and not start:
        raise DependencyError(
            "No Ray cluster is running for this FLYWHEEL_HOME.",
            hint="Start one with `flywheel demo --keep`, or set RAY_ADDRESS.",
            retryable=False,
        )
    owned = target is None
    if owned:
        haproxy.prepare_folder()
        _choose_fallback_port()
    common: dict[str, Any] = {
        "namespace": NAMESPACE,
        "log_to_driver": False,
        "logging_level": logging.WARNING,
        "runtime_env": {"env_vars": environment.for_workers()},
    }
    if owned:
        home.root.mkdir(parents=True, exist_ok=True)
        _ensure_token()
        context = ray.init(address="local", num_cpus=num_cpus or default_cpus(), include_dashboard=True, **common)
    else:
        _require_answer(str(target))
        try:
            context = ray.init(address=target, **common)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            raise DependencyError(
                f"Ray at {target!r} cannot be reached: {str(error).splitlines()[0]}",
                hint="Start it with `ray start --head`, mend RAY_ADDRESS, or unset it to let Flywheel start Ray.",
                retryable=False,
            ) from None
    log_to_file(home)
    url = f"http://{context.dashboard_url}" if context.dashboard_url else None
    try:
        yield Session(ray.get_runtime_context().gcs_address, owned, url)
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Say at once that nothing listens at `address`: Ray itself tries for minutes, and then aborts the process."""
    scheme, separator, _ = address.partition("://")
    if separator:
        raise ConfigError(
            f"{address!r} is the address of a {'Ray client' if scheme == 'ray' else 'dashboard'}, not of Ray itself.",
            hint="Set RAY_ADDRESS to host:6379 of the head node, or auto on it; or use `ray job submit`.",
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" and "local": Ray looks for itself, and answers quickly
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_WAIT_S).close()
    except OSError as error:
        raise DependencyError(
            f"Ray at {address!r} cannot be reached: {error.strerror or error}.",
            hint="Start it with `ray start --head`, mend RAY_ADDRESS, or unset it to let Flywheel start Ray.",
            retryable=False,
        ) from None


def _ensure_token() -> None:
    """Make the token of our own cluster. Ray makes one only in the user's home folder, and fails elsewhere."""
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", ""))
    if path.name and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(path, secrets.token_hex(32))
        path.chmod(0o600)


def _choose_fallback_port() -> None:
    """A port for the proxy that stands behind HAProxy: clusters share a machine."""
    if environment.haproxy_folder() is not None and environment.FALLBACK_PORT not in os.environ:
        os.environ[environment.FALLBACK_PORT] = str(free_port())


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def default_cpus() -> int:
    """Logical CPUs of our own cluster.

    They are a scheduling allowance, not a measure: two trainers, the data feed and a driver's task must be
    placed at once, also on a laptop with two cores (docs/decisions/0003-logical-cpus.md).
    """
    return max(4, os.cpu_count() or 1)


def require_free_port(host: str, port: int) -> None:
    """`ConfigError` if something listens on `host:port` already."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"Port {port} on {host} cannot be used: {error.strerror}.",
                hint="Stop what listens there, or choose another: --set serve.gateway.port=8001.",
            ) from None
