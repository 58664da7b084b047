"""The tensors of a checkpoint: copied aside, written as shards by torch's DCP, and read back into any layout.

Copying and writing are apart, so that training waits for the copy alone. DCP plans from shapes and layouts (meta
tensors in `Staging.outline`) and takes the numbers from the copies; a tensor that several ranks hold is written by one
of them. Its `.metadata` is a pickle that torch reads: `read` is for files whose digests the caller has checked.
"""

import hashlib
import logging
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.logging_handlers import DCP_LOGGER_NAME
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from actors.training import mesh
from actors.training.checkpoint.manifest import FileFact
from cluster.errors import TrainingError

# We say `no_dist` where one process works alone, and mean it.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

# DCP notes the beginning and end of every tensor, at a level of its own choice, also where nobody asked for it.
logging.getLogger(f"c10d-NullHandler-{DCP_LOGGER_NAME}").setLevel(logging.WARNING)

_META: Final = torch.device("meta")


class Staging:
    """Copies of a state in CPU memory, allocated once and used again for every checkpoint.

    The buffers are pinned if the state lies on a GPU. The state must keep its names, shapes and layouts.
    """

    def __init__(self) -> None:
        self.outline: dict[str, Any] = {}
        """The state's shapes, dtypes and layouts, without any memory."""
        self.buffers: dict[str, torch.Tensor] = {}
        self._written: frozenset[str] | None = None
        self._preparing: threading.Thread | None = None

    @torch.no_grad()
    def prepare(self, state: Mapping[str, torch.Tensor]) -> None:
        """Have the buffers for such a state ready soon: new memory is several times as slow as memory in use."""
        self._outline(state)
        parts = [(name, mesh.local(tensor)) for name, tensor in state.items()]
        shapes = [(name, part.shape, part.dtype, part.is_cuda) for name, part in parts]

        def allocate() -> None:
            for name, shape, dtype, pinned in shapes:
                self.buffers[name] = torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=pinned)

        self._preparing = threading.Thread(target=allocate, name="checkpoint-buffers", daemon=True)
        self._preparing.start()

    @torch.no_grad()
    def copy(self, state: Mapping[str, torch.Tensor]) -> int:
        """Copy what this rank will write of `state`, and return when it is copied. Returns its bytes."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        if state.keys() != self.outline.keys():
            self._outline(state)
        copied, device = 0, None
        for name, tensor in state.items():
            if self._written is not None and name not in self._written:
                continue
            local = mesh.local(tensor)
            buffer = self.buffers.get(name)
            if buffer is None:
                buffer = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
                self.buffers[name] = buffer
            buffer.copy_(local, non_blocking=True)
            copied += buffer.nbytes
            if local.is_cuda:
                device = local.device
        if device is not None:
            torch.cuda.current_stream(device).synchronize()
        return copied

    def _outline(self, state: Mapping[str, torch.Tensor]) -> None:
        self.outline = {name: _outline(tensor) for name, tensor in state.items()}
        self.buffers, self._written = {}, None

    def keep_only(self, names: Collection[str]) -> None:
        """From now on copy only these: the others are written by other ranks."""
        self._written = frozenset(names)
        self.buffers = {name: buffer for name, buffer in self.buffers.items() if name in self._written}

    def total_bytes(self) -> dict[str, int]:
        """Bytes of each whole tensor that this rank has a part of."""
        return {name: tensor.numel() * tensor.element_size() for name, tensor in self.outline.items()}


def write(staging: Staging, folder: Path, group: Any, *, durable: bool) -> dict[str, FileFact]:
    """Write the staged state as this rank's shards into `folder` and return the files it wrote. On every rank.

    `group` is a gloo process group of its own, or None for one process alone. An error of one rank is raised on all:
    `OSError` if a disk failed.
    """
    planner, writer = _Planner(staging.buffers), _Writer(folder, durable=durable)
    # A CRC-32 of each tensor beside our SHA-256 of each file is a sixth of the work, and nobody reads it.
    checked = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save(
            dict(staging.outline), storage_writer=writer, planner=planner, process_group=group, no_dist=group is None
        )
    except CheckpointException as error:
        raise _cause(error) from None
    finally:
        torch.serialization.set_crc32_options(checked)
    staging.keep_only(planner.written)
    return writer.files


def read(folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Fill `state` in place from the shards in `folder`, whatever layout they were written from.

    Each rank reads its own part, and no other rank takes part. `TrainingError` if the state is another model's.
    """
    try:
        dcp.load(dict(state), storage_reader=FileSystemReader(folder), no_dist=True)
    except CheckpointException as error:
        raise _misfit(folder, _cause(error)) from None


def needed(folder: Path, state: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """The files in `folder` that `read` will open for this rank's part of `state`, besides `.metadata`."""
    metadata = FileSystemReader(folder).read_metadata()
    planner = DefaultLoadPlanner()
    planner.set_up_planner(dict(state), metadata, is_coordinator=True)
    try:
        items = planner.create_local_plan().items
    except (RuntimeError, ValueError) as error:
        raise _misfit(folder, error) from None
    return frozenset(metadata.storage_data[item.storage_index].relative_path for item in items)


def read_whole(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """All tensors in `folder` whose names begin with `prefix`, whole, under their names without it."""
    metadata = FileSystemReader(folder).read_metadata()
    state = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in metadata.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(stored, TensorStorageMetadata)
    }
    read(folder, state)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def _outline(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=_META)
    local = mesh.local(tensor)
    return DTensor.from_local(
        torch.empty(local.shape, dtype=local.dtype, device=_META),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


class _Planner(DefaultSavePlanner):
    """Plans from the outline, takes the numbers from the copies, and remembers what this rank had to write."""

    def __init__(self, buffers: Mapping[str, torch.Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._buffers = buffers
        self.written: frozenset[str] = frozenset()

    def finish_plan(self, new_plan: Any) -> Any:
        finished = super().finish_plan(new_plan)
        self.written = frozenset(item.index.fqn for item in finished.items)
        return finished

    def resolve_data(self, write_item: Any) -> torch.Tensor:
        buffer = self._buffers[write_item.index.fqn]
        if buffer.shape != write_item.tensor_data.chunk.sizes:
            raise ValueError(f"{write_item.index.fqn}: {buffer.shape} copied, {write_item.tensor_data.chunk} planned")
        return buffer


class _Writer(FileSystemWriter):
    """DCP's writer, which also says what it wrote, and by which error of the disk it failed."""

    def __init__(self, folder: Path, *, durable: bool) -> None:
        super().__init__(folder, sync_files=durable)
        self.fs = _Digesting()

    @property
    def files(self) -> dict[str, FileFact]:
        return dict(self.fs.files)

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError:
            if self.fs.error is None:
                raise
            raise self.fs.error from None  # torch's zip writer says only that it could not write


class _Digesting(FileSystem):
    """Files on the disk, digested while they are written."""

    def __init__(self) -> None:
        self.files: dict[str, FileFact] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            if "w" not in mode:
                yield stream
                return
            digested = _Digested(stream, self)
            yield digested
        self.files[Path(path).name] = FileFact(digested.size, digested.sha256.hexdigest())

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class _Digested:
    """A file that is only appended to."""

    def __init__(self, stream: Any, owner: _Digesting) -> None:
        self._stream = stream
        self._owner = owner
        self.sha256 = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> int:
        try:
            written: int = self._stream.write(data)
        except OSError as error:
            self._owner.error = error
            raise
        self.sha256.update(data)
        self.size += written
        return written

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def close(self) -> None:
        self._stream.close()


def _cause(error: CheckpointException) -> BaseException:
    """What went wrong on the rank that failed; a disk's error before any other."""
    causes = [cause for _, (cause, _) in sorted(error.failures.items())]
    return next((cause for cause in causes if isinstance(cause, OSError)), causes[0])


def _misfit(folder: Path, cause: BaseException) -> BaseException:
    if not isinstance(cause, RuntimeError | ValueError):
        return cause
    return TrainingError(
        f"The checkpoint in {folder} does not fit this model: {str(cause).splitlines()[0]}",
        hint="Resume with the base and the adapter settings that the run began with, or start a new run.",
    )
