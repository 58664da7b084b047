"""What goes wrong inside a training worker, on purpose: real workers, of which one does something odd, once.

`told` gives the environment of a driver whose workers know a `Mishap`. Ray runs `install` in each of its workers (a
`worker_process_setup_hook`, which `RAY_RUNTIME_ENV_HOOK` adds in the driver). Imports neither torch nor Ray at once:
every process that Ray starts pays for it.
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

TOLD: Final = "FLYWHEEL_TEST_MISHAP"
_PIECE: Final = 128 << 20
_MOST: Final = 10 << 30


@dataclass(frozen=True)
class Mishap:
    """The worker at `ip`, or of `rank`, does `deed` when it is `phase` of a step after step `step`. Only once: the
    file `done` is made then, and is as old as the deed."""

    deed: Literal["dawdle", "mistake", "hog"]
    done: str
    rank: int | None = None
    ip: str | None = None
    phase: str = "compute"
    step: int = 10

    def at_s(self) -> float:
        """When it was done (`time.time`)."""
        return Path(self.done).stat().st_mtime


def told(mishap: Mishap) -> dict[str, str]:
    """What a driver's environment needs besides."""
    return {"RAY_RUNTIME_ENV_HOOK": f"{__name__}.with_hook", TOLD: json.dumps(dataclasses.asdict(mishap))}


def with_hook(runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """Called by Ray in the driver: its runtime environment, with what makes the mishap happen."""
    wanted = dict(runtime_env or {})
    wanted["env_vars"] = {**wanted.get("env_vars", {}), TOLD: os.environ[TOLD]}
    wanted["worker_process_setup_hook"] = f"{__name__}.install"
    return wanted


def install() -> None:
    """Called by Ray in each worker: whoever is meant does the deed at one of the moments it tells its control of."""
    from actors.training.control import ControlLink

    mishap = Mishap(**json.loads(os.environ[TOLD]))
    told_before = ControlLink.at

    def at(self: ControlLink, phase: Any, step: int) -> None:
        told_before(self, phase, step)
        if phase == mishap.phase and step >= mishap.step and _is_meant(mishap) and _first(Path(mishap.done)):
            _DEEDS[mishap.deed]()

    ControlLink.at = at  # type: ignore[method-assign]


def _is_meant(mishap: Mishap) -> bool:
    import ray.train

    if mishap.ip is not None:
        return bool(ray.util.get_node_ip_address() == mishap.ip)
    return bool(ray.train.get_context().get_world_rank() == mishap.rank)


def _first(done: Path) -> bool:
    try:
        done.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def dawdle() -> None:
    time.sleep(3600)


def mistake() -> None:
    raise KeyError("labels")


def hog() -> None:
    """Take memory until somebody ends this process."""
    held = []
    while len(held) * _PIECE < _MOST:
        held.append(b"x" * _PIECE)
        time.sleep(0.1)


_DEEDS: Final[Mapping[str, Callable[[], None]]] = {"dawdle": dawdle, "mistake": mistake, "hog": hog}
