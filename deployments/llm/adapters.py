"""The node's copies of adapters: fetched once, verified by digest, never deleted while an engine may want them.

vLLM keeps the path of every adapter that it has ever loaded, and reads the files again after it has evicted
the adapter from memory. If they are gone by then, the whole engine dies, and with it every request, base
included. So the engine is only ever given paths in this cache, and every use of an adapter looks first
whether its files are whole. This module knows files and digests; it knows neither Ray nor vLLM.
"""

import asyncio
import json
import logging
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from cluster.errors import DependencyError, RequestError
from cluster.storage import PARTIAL_PREFIX, digest_folder, publish
from deployments.llm.protocol import Adapter

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
_PICKLES = frozenset({".bin", ".pt", ".pth", ".pkl", ".ckpt"})

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Copy:
    """A verified copy and the sizes of its files, in bytes, by relative name."""

    folder: Path
    sizes: dict[str, int]

    def whole(self) -> bool:
        try:
            return all((self.folder / name).stat().st_size == size for name, size in self.sizes.items())
        except OSError:
            return False


class AdapterCache:
    """Immutable copies under `root/<digest>`. One flight per adapter, however many requests want it."""

    def __init__(self, root: Path, *, max_rank: int, base: Path) -> None:
        """`base`: folder of the weights that the adapters are for."""
        self._root = root
        self._max_rank = max_rank
        self._base = base
        self._copies: dict[str, _Copy] = {}
        self._flights: dict[str, asyncio.Task[_Copy]] = {}

    async def fetch(self, adapter: Adapter) -> Path:
        """Folder of the adapter's verified copy on this node.

        Raises `DependencyError` if its files are missing or are not what was registered, and `RequestError`
        if they are whole but the engine cannot take them. A failure is not remembered: the next call tries again.
        """
        copy = self._copies.get(adapter.digest)
        if copy is not None and copy.whole():
            return copy.folder
        flight = self._flights.get(adapter.digest)
        if flight is None:
            flight = asyncio.create_task(asyncio.to_thread(self._bring, adapter))
            self._flights[adapter.digest] = flight
            flight.add_done_callback(lambda _: self._flights.pop(adapter.digest, None))
        # Shielded: one client that hangs up must not cancel the copy that others wait for.
        copy = await asyncio.shield(flight)
        self._copies[adapter.digest] = copy
        return copy.folder

    def _bring(self, adapter: Adapter) -> _Copy:
        target = self._root / adapter.digest
        if target.is_dir() and digest_folder(target) != adapter.digest:
            # Somebody has touched the cache. Moved aside, not deleted: an engine may be reading from it.
            aside = self._root / f"{PARTIAL_PREFIX}broken-{adapter.digest[:16]}-{uuid.uuid4().hex[:8]}"
            target.rename(aside)
            logger.warning("The cached copy of %s was damaged; it is now %s and is made anew.", adapter.version, aside)
        if not target.is_dir():
            self._copy(adapter, target)
        self._check(adapter, target)
        return _Copy(target, {path.relative_to(target).as_posix(): path.stat().st_size for path in _files(target)})

    def _copy(self, adapter: Adapter, target: Path) -> None:
        try:
            with publish(target) as scratch:
                shutil.copytree(adapter.path, scratch, dirs_exist_ok=True)
                found = digest_folder(scratch)
                if found != adapter.digest:
                    raise _refused(
                        adapter, f"its files have digest {found[:12]}, not {adapter.digest[:12]} as registered"
                    )
        except (OSError, shutil.Error) as error:
            logger.error("Adapter %s could not be copied from %s: %s", adapter.version, adapter.path, error)
            raise _refused(adapter, "its files are missing or cannot be read") from None

    def _check(self, adapter: Adapter, folder: Path) -> None:
        names = {path.name for path in _files(folder)}
        if missing := {CONFIG_FILE, WEIGHTS_FILE} - names:
            raise _refused(adapter, f"it has no {' and no '.join(sorted(missing))}")
        if pickles := sorted(name for name in names if Path(name).suffix in _PICKLES):
            raise _refused(adapter, f"it holds {pickles[0]}, and only safetensors are loaded")
        try:
            rank = int(json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))["r"])
        except (ValueError, KeyError, TypeError):
            raise _refused(adapter, f"its {CONFIG_FILE} names no rank") from None
        if rank > self._max_rank:
            raise RequestError(
                f"Adapter {adapter.version} has rank {rank}; this engine takes at most {self._max_rank}.",
                param="model",
                code="adapter_rank_too_large",
                hint="Serve with a larger llm.max_lora_rank, or train with a smaller adapter.r.",
            )
        if misfit := first_misfit(shapes(folder), shapes(self._base)):
            raise RequestError(
                f"Adapter {adapter.version} does not fit {self._base.name}: {misfit}.",
                param="model",
                code="adapter_invalid",
                hint="Register an adapter that was trained on this base.",
            )


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in a folder's safetensors, by name; reads only their headers."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            found.update({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
    return found


def first_misfit(adapter: Mapping[str, tuple[int, ...]], base: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why LoRA matrices A [r, in] and B [out, r] cannot go onto weights [out, in], or None.

    vLLM 0.32 does not look: it copies a smaller matrix into the corner of a larger one and answers with that.
    """
    for name, shape in adapter.items():
        module, _, matrix = name.removeprefix(_PEFT_PREFIX).rpartition(".lora_")
        if matrix not in ("A.weight", "B.weight"):
            continue
        weight = base.get(f"{module}.weight")
        if weight is None:
            continue  # a checkpoint may name its modules otherwise; vLLM itself refuses a module that it lacks
        axis = 1 if matrix == "A.weight" else 0
        if shape[axis] != weight[axis]:
            return f"{module} is {weight[0]} × {weight[1]}, the adapter's {matrix[0]} is {shape[0]} × {shape[1]}"
    return None


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _refused(adapter: Adapter, why: str) -> DependencyError:
    return DependencyError(
        f"Adapter {adapter.version} cannot be loaded: {why}.",
        hint="Register the adapter again, or ask for another version.",
        retryable=False,
    )
