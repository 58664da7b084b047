"""Kill -9 at every point: a process that dies at its n-th change of the disk, for every n.

Run as `python crashes.py MODULE FUNCTION FOLDER`: for n = 1, 2, … a fork calls `FUNCTION(FOLDER/n)` of the test
module, and is gone, without a finally or a flush, right before its n-th call of the system that changes something.
The last fork lives. The last line says how many died.
"""

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CHANGES = (
    "copy_file_range",
    "fdatasync",
    "fsync",
    "ftruncate",
    "mkdir",
    "open",
    "pwrite",
    "rename",
    "replace",
    "rmdir",
    "unlink",
    "utime",
    "write",
)
_DIED = 137


def every_crash(test_module: str, function: str, folder: Path) -> list[Path]:
    """Folders in each of which the function died one change later than in the one before; in the last one it ended."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, __file__, test_module, function, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [folder / str(number) for number in range(1, int(done.stdout.split()[-1]) + 2)]


def _main(test_module: str, function: str, folder: Path) -> None:
    spec = importlib.util.spec_from_file_location("crashing", test_module)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    work: Callable[[Path], None] = getattr(module, function)
    import model_signing.signing  # noqa: F401  # once, not in every fork

    for number in range(1, 1000):
        place = folder / str(number)
        place.mkdir(parents=True, exist_ok=True)
        child = os.fork()
        if child == 0:
            _die_at(number)
            work(place)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            sys.stdout.write(f"{number - 1}\n")
            return
        assert code == _DIED, f"change {number}: exit {code}"
    raise AssertionError("it never ends")


def _die_at(number: int) -> None:
    counting, done = threading.Lock(), 0

    def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            nonlocal done
            with counting:
                done += 1
                if done == number:
                    os._exit(_DIED)
            return call(*arguments, **named)

        return wrapped

    for name in _CHANGES:
        setattr(os, name, deadly(getattr(os, name)))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
