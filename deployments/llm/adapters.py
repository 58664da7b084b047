"""The node's copies of adapters: fetched once, verified by signature, never deleted while an engine may want them.

vLLM keeps the path of every adapter that it has ever loaded, and reads the files again after it has evicted
the adapter from memory. If they are gone by then, the whole engine dies, and with it every request, base
included. So the engine is only ever given paths in this cache, and every use of an adapter looks first
whether its files are whole. This module knows files and signatures; it knows neither Ray nor vLLM.
"""

import asyncio
import json
import logging
import os
import shutil
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from cluster.errors import CapacityError, DependencyError, RequestError
from cluster.signing import SignatureError, signature_path, verify
from cluster.storage import DISK_FULL, LOCK, PARTIAL_PREFIX, Home, only_one, publish, write_atomically
from deployments.llm.protocol import Adapter
from deployments.llm.templates import chat_template

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
_PICKLES = frozenset({".bin", ".pt", ".pth", ".pkl", ".ckpt"})

_FETCHES = 4
"""At a time. Threads of their own: slow storage must not hold up what else this process does in threads."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Copy:
    """A verified copy, the sizes of its files, in bytes, by relative name, and its own chat template."""

    folder: Path
    sizes: dict[str, int]
    template: str | None

    def whole(self) -> bool:
        try:
            return all((self.folder / name).stat().st_size == size for name, size in self.sizes.items())
        except OSError:
            return False


class AdapterCache:
    """Immutable copies under `home.adapter_cache/<digest>`, each with the signature of the version it is a copy of.

    One flight per adapter, however many requests want it; a replica verifies a digest once, not per request.
    """

    def __init__(self, home: Home, *, max_rank: int, base: Path) -> None:
        """`home`: whose keys are trusted, and whose cache it is. `base`: the weights that the adapters are for."""
        self._home = home
        self._root = home.adapter_cache
        self._max_rank = max_rank
        self._base = base
        self._copies: dict[str, _Copy] = {}
        self._flights: dict[str, asyncio.Future[_Copy]] = {}
        self._threads = ThreadPoolExecutor(_FETCHES, thread_name_prefix="adapter-fetch")

    async def fetch(self, adapter: Adapter) -> Path:
        """Folder of the adapter's verified copy on this node.

        Raises `DependencyError` if its files are missing, `SignatureError` (which is one, too) if nobody who is
        trusted vouches for them or they are not what was registered, `RequestError` if they are good but the
        engine cannot take them, and `CapacityError` if this node's disk is full. A failure is not remembered: the
        next call tries again.
        """
        copy = self._copies.get(adapter.digest)
        if copy is not None and copy.whole():
            return copy.folder
        flight = self._flights.get(adapter.digest)
        if flight is None:
            # With the context of the first who wants it: what is logged on the way holds its request's id.
            bring = copy_context().run
            flight = asyncio.get_running_loop().run_in_executor(self._threads, bring, self._bring, adapter)
            self._flights[adapter.digest] = flight
            flight.add_done_callback(lambda _: self._flights.pop(adapter.digest, None))
        # Shielded: one client that hangs up must not cancel the copy that others wait for.
        copy = await asyncio.shield(flight)
        self._copies[adapter.digest] = copy
        return copy.folder

    def template(self, adapter: Adapter) -> str | None:
        """The chat template that came with an adapter which has been fetched; None: the base's is meant."""
        return self._copies[adapter.digest].template

    def _bring(self, adapter: Adapter) -> _Copy:
        try:
            return self._verified(adapter)
        except OSError as error:
            if not _is_disk_full(error):
                raise
            logger.error("Adapter %s could not be copied to %s: %s", adapter.version, self._root, error)
            raise CapacityError(
                f"Adapter {adapter.version} cannot be loaded: the disk of a serving node is full.",
                hint="Its operator can free space there, for example with `flywheel models gc`.",
            ) from None

    def _verified(self, adapter: Adapter) -> _Copy:
        # Called when `_copies` does not vouch for it, so from here on every byte is looked at again: no `Verifier`.
        target = self._root / adapter.digest
        if self._touched(target):
            try:
                self._verify(adapter, target, signature_path(target))
            except SignatureError as refused:
                # Somebody has touched the cache. Moved aside, not deleted: an engine may be reading from it.
                aside = self._root / f"{PARTIAL_PREFIX}broken-{adapter.digest[:16]}-{uuid.uuid4().hex[:8]}"
                with suppress(FileNotFoundError):  # a collection has taken it away: that is why it was refused
                    target.rename(aside)
                    os.utime(aside)
                    logger.warning("The copy of %s is now %s, made anew: %s.", adapter.version, aside, refused.reason)
        if not target.is_dir():
            self._copy(adapter, target)
        self._check(adapter, target)
        sizes = {path.relative_to(target).as_posix(): path.stat().st_size for path in _files(target)}
        return _Copy(target, sizes, chat_template(target))

    def _touched(self, target: Path) -> bool:
        """Whether there is a copy; a collection spares it as if it had just been made."""
        with only_one(self._root / LOCK):
            if not target.is_dir():
                return False
            os.utime(target)
            return True

    def _copy(self, adapter: Adapter, target: Path) -> None:
        source = Path(adapter.path)
        try:
            with ExitStack() as until_published, publish(target) as scratch:
                # A link is copied as a link, and so refused: what it leads to was not signed.
                shutil.copytree(source, scratch, dirs_exist_ok=True, symlinks=True)
                os.utime(scratch)  # `copytree` has made it as old as its source, and collections spare what is young
                self._verify(adapter, scratch, signature_path(source))
                # So that no collection sees, or takes, the one without the other.
                until_published.enter_context(only_one(self._root / LOCK))
                # Before the copy appears, so that there is none without. Its size was looked at when it was verified.
                write_atomically(signature_path(target), signature_path(source).read_text(encoding="utf-8"))
        except OSError as error:
            if _is_disk_full(error):
                raise
            logger.error("Adapter %s could not be copied from %s: %s", adapter.version, adapter.path, error)
            raise _refused(adapter, "its files are missing or cannot be read") from None

    def _verify(self, adapter: Adapter, folder: Path, signature: Path) -> None:
        what = f"adapter {adapter.version}"
        verify(folder, self._home, what=what, digest=adapter.digest, signature=signature)

    def _check(self, adapter: Adapter, folder: Path) -> None:
        names = {path.name for path in _files(folder)}
        if missing := {CONFIG_FILE, WEIGHTS_FILE} - names:
            raise _refused(adapter, f"it has no {' and no '.join(sorted(missing))}")
        if pickles := sorted(name for name in names if Path(name).suffix in _PICKLES):
            raise _refused(adapter, f"it holds {pickles[0]}, and only safetensors are loaded")
        try:
            chat_template(folder)
        except ValueError as error:
            raise _refused(adapter, f"its chat template cannot be read ({error})") from None
        try:
            settings = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
            rank = max(map(int, [settings["r"], *settings.get("rank_pattern", {}).values()]))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise _refused(adapter, f"its {CONFIG_FILE} names no rank") from None
        if rank > self._max_rank:
            raise RequestError(
                f"Adapter {adapter.version} has rank {rank}; this engine takes at most {self._max_rank}.",
                status=422,
                param="model",
                code="adapter_rank_too_large",
                hint="Serve with a larger llm.max_lora_rank, or train with a smaller adapter.r.",
            )
        if misfit := first_misfit(shapes(folder), shapes(self._base)):
            raise _invalid(
                f"Adapter {adapter.version} does not fit {self._base.name}: {misfit}.",
                hint="Register an adapter that was trained on this base.",
            )
        if broken := first_not_finite(folder):
            # In a batch its columns are multiplied by zero for all others, and 0 · NaN is NaN (see engine_plugin).
            raise _invalid(
                f"Adapter {adapter.version} holds NaN or infinity in {broken}.",
                hint="Its training has diverged: register an earlier checkpoint, or train with a lower learning rate.",
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


def first_not_finite(folder: Path) -> str | None:
    """The first tensor in a folder's safetensors that holds a NaN or an infinity, or None; reads them all."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names: list[str] = sorted(file.keys())
            for name in names:
                if not file.get_tensor(name).isfinite().all():
                    return name
    return None


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _is_disk_full(error: OSError) -> bool:
    # `copytree` gathers the errors of all files, as text.
    return error.errno in DISK_FULL or any(os.strerror(number) in str(error) for number in DISK_FULL)


def _refused(adapter: Adapter, why: str) -> DependencyError:
    return DependencyError(
        f"Adapter {adapter.version} cannot be loaded: {why}.",
        hint="Register the adapter again, or ask for another version.",
        retryable=False,
    )


def _invalid(message: str, *, hint: str) -> RequestError:
    return RequestError(message, status=422, param="model", code="adapter_invalid", hint=hint)
