"""The rows of a run as one stream of Ray Data, from the position at which it goes on to its end.

A stream is made for each start of the worker group. It begins at the last durable checkpoint and reads nothing that
lies before it; it does not end with an epoch, so that no epoch waits for a new one. It is made of shares: a row of
the stream is the whole share of one rank in one step, so dealing rows in turn deals every rank its own. That Ray
deals in turn is checked and not believed: shares carry their positions, and `batching.micro_batches` refuses others.

Owns what Ray Train and Ray Data are told of the feed. Which row stands where is `order`'s.
"""

import errno
import math
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray.data
import ray.train
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata
from ray.train import DataConfig

from actors.data.version import DataVersion
from actors.training import columns
from actors.training.config import ParallelConfig
from actors.training.layout import Layout
from actors.training.order import Order, Rows
from actors.training.steps import COLUMNS, POSITION, ROW, SAMPLES, StepPlan
from cluster.errors import DependencyError, FlywheelError, StateError
from cluster.storage import Home

NAME = "train"
"""What workers call the feed."""

_SHARES = "flywheel.feed.shares"
_READ = [*COLUMNS, ROW, SAMPLES]
_READERS = 2
_MAX_TASKS = 1000
_WINDOWS_PER_TASK = 4
_KEPT_BYTES = 512 << 20
"""Of row groups, for versions of releases that wrote larger ones."""


@dataclass(frozen=True)
class Stream:
    """Called by Ray Train whenever it starts a group of workers; gives the rest of the run.

    `begin` names the step to go on from. A worker that goes on from a later step drops what it need not have.
    """

    files: tuple[Path, ...]
    file_rows: tuple[int, ...]
    order: Order
    steps: int
    batch: int
    begin: Callable[[], int]

    @classmethod
    def of(cls, data: DataVersion, home: Home, plan: StepPlan, order: Order, begin: Callable[[], int]) -> "Stream":
        return cls(
            files=tuple(data.shards("train", home)),
            file_rows=tuple(file.rows for file in data.splits["train"].files),
            order=order,
            steps=plan.steps,
            batch=plan.global_batch_size,
            begin=begin,
        )

    def __call__(self) -> ray.data.Dataset:
        # A reader waits for the rows that the others have not yet trained on most of the time, so it holds no CPU:
        # a run whose workers hold all of them has a feed too.
        # (`override_num_blocks` is 1 because Ray Data else splits what a few tasks read: each share, into empty parts.)
        source = _Shares(self, self.begin())
        return ray.data.read_datasource(source, num_cpus=0, concurrency=_READERS, override_num_blocks=1)


class Dealing(DataConfig):
    """How the stream is dealt: in turn to the readers of the layout; other ranks get none."""

    def __init__(self, parallel: ParallelConfig) -> None:
        super().__init__(enable_shard_locality=False)
        self._parallel = parallel

    def configure(
        self,
        datasets: dict[str, ray.data.Dataset],
        world_size: int,
        worker_handles: Any,  # noqa: ARG002 (the signature is Ray's)
        worker_node_ids: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> list[dict[str, Any]]:
        """Called for each group of workers; gives every rank its part of every dataset."""
        layout = Layout.of(self._parallel, world_size)
        parts: list[dict[str, Any]] = [dict.fromkeys(datasets) for _ in range(world_size)]
        for name, dataset in datasets.items():
            context = dataset.context
            context.execution_options = self.default_ingest_options()
            context.execution_options.preserve_order = True
            # Ray Data gathers what a task reads into blocks of this size: each share is to be a block of its own.
            context.target_max_block_size = 1
            context.set_config(_SHARES, layout.data)
            for rank, part in zip(layout.readers, dataset.streaming_split(layout.data), strict=True):
                parts[rank][name] = part
        return parts


def opened(parallel: ParallelConfig) -> Iterator[pa.Table] | None:
    """The shares that this worker is dealt; None if it is no reader of its layout. Called in a worker of Ray Train.

    The first share is fetched in the background from this moment on: a stream takes seconds to start, which are better
    spent while torch and the model are loaded.
    """
    context = ray.train.get_context()
    rank = context.get_world_rank()
    if Layout.of(parallel, context.get_world_size()).reader(rank) != rank:
        return None
    begun: queue.SimpleQueue[tuple[pa.Table | None, Iterator[pa.Table]] | BaseException] = queue.SimpleQueue()

    def begin() -> None:
        try:
            stream = shares(ray.train.get_dataset_shard(NAME))
            begun.put((next(stream, None), stream))
        except BaseException as error:  # noqa: BLE001 (whoever asks for the first share gets it)
            begun.put(error)

    threading.Thread(target=begin, name="first-share", daemon=True).start()
    return _joined(begun)


def _joined(
    begun: "queue.SimpleQueue[tuple[pa.Table | None, Iterator[pa.Table]] | BaseException]",
) -> Iterator[pa.Table]:
    first = begun.get()
    if isinstance(first, BaseException):
        raise first
    share, stream = first
    if share is not None:
        yield share
        yield from stream


def shares(dealt: Any) -> Iterator[pa.Table]:
    """The share of each step, as rows again. `dealt` is what `ray.train.get_dataset_shard(NAME)` gives a reader."""
    for block in dealt.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=2):
        yield from rows_of(block)


def rows_of(shares: pa.Table) -> Iterator[pa.Table]:
    """The rows of each share in a block of the stream."""
    for number in range(shares.num_rows):
        share = shares.slice(number, 1)
        yield pa.table({name: share.column(name).combine_chunks().flatten() for name in share.schema.names})


class _Shares(Datasource):
    """The shares of the steps from `first` on."""

    def __init__(self, stream: Stream, first: int) -> None:
        super().__init__()
        self._stream = stream
        self._first = first

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self,
        parallelism: int,  # noqa: ARG002 (the signature is Ray's)
        per_task_row_limit: int | None = None,  # noqa: ARG002
        data_context: Any = None,
    ) -> list[ReadTask]:
        """Tasks of whole steps, each long enough that the windows at its ends, which two tasks read, weigh little."""
        stream, shares = self._stream, (data_context.get_config(_SHARES, 1) if data_context else 1)
        window = stream.order.chunk_rows * stream.order.window_chunks
        left = stream.steps - self._first
        size = max(math.ceil(_WINDOWS_PER_TASK * window / stream.batch), math.ceil(left / _MAX_TASKS))
        return [
            ReadTask(
                partial(_read, stream, begin, min(begin + size, stream.steps), shares),
                BlockMetadata((min(begin + size, stream.steps) - begin) * shares, None, None, None),
            )
            for begin in range(self._first, stream.steps, size)
        ]


def _read(stream: Stream, begin: int, end: int, shares: int) -> Iterator[pa.Table]:
    """One Ray task: each share of the steps from `begin` to before `end`, as a table of one row."""
    groups = _Groups(stream)
    size = stream.batch // shares
    for first in range(begin * stream.batch, end * stream.batch, size):
        pieces = [groups.rows(piece.rows) for piece in stream.order.pieces(first, first + size)]
        rows = pa.concat_tables(pieces).combine_chunks()
        positions = pa.array(np.arange(first, first + size))
        parts = {name: rows.column(name).chunk(0) for name in rows.schema.names} | {POSITION: positions}
        whole = pa.array([0, size], pa.int32())
        yield pa.table({name: pa.ListArray.from_arrays(whole, part) for name, part in parts.items()})


class _Groups:
    """Rows by their number. Keeps the row groups last read: a window is read over several steps, and the window of a
    small split is the whole of it, epoch after epoch."""

    def __init__(self, stream: Stream) -> None:
        self._files = stream.files
        self._sizes = stream.file_rows
        self._ends = np.cumsum(stream.file_rows)
        self._keep = 2 * stream.order.window_chunks  # a chunk may lie across two groups
        self._groups: OrderedDict[tuple[int, int], pa.Table] = OrderedDict()
        self._group_ends = cache(self._read_group_ends)

    def rows(self, numbers: Rows) -> pa.Table:
        """The rows with these numbers, in this order.

        `StateError` if a file does not hold what its manifest says, `DependencyError` if its storage fails.
        """
        tables, places = [], []
        of_file = np.searchsorted(self._ends, numbers, side="right")
        for file in np.unique(of_file).tolist():
            [in_file] = np.nonzero(of_file == file)
            local = numbers[in_file] - (self._ends[file - 1] if file else 0)
            ends = self._group_ends(file)
            of_group = np.searchsorted(ends, local, side="right")
            for group in np.unique(of_group).tolist():
                [in_group] = np.nonzero(of_group == group)
                within = local[in_group] - (ends[group - 1] if group else 0)
                tables.append(self._group(file, group).take(within))
                places.append(in_file[in_group])
        try:
            table = pa.concat_tables(tables).take(np.argsort(np.concatenate(places)))
        except pa.ArrowException as error:
            raise self._damaged(f"its files differ: {error}") from None
        if not np.array_equal(table.column(ROW).to_numpy(), numbers):
            raise self._damaged("its rows are not numbered as they were")
        return table

    def _group(self, file: int, group: int) -> pa.Table:
        if (file, group) not in self._groups:
            try:
                with pq.ParquetFile(self._files[file]) as opened:
                    # One thread: the cores are the trainers'.
                    self._groups[file, group] = opened.read_row_group(group, columns=_READ, use_threads=False)
            except (pa.ArrowException, OSError) as error:
                raise self._unreadable(file, error) from None
            while len(self._groups) > self._keep or (len(self._groups) > 1 and self._kept_bytes() > _KEPT_BYTES):
                self._groups.popitem(last=False)
        self._groups.move_to_end((file, group))
        return self._groups[file, group]

    def _kept_bytes(self) -> int:
        return sum(table.nbytes for table in self._groups.values())

    def _read_group_ends(self, file: int) -> Rows:
        try:
            facts = pq.read_metadata(self._files[file])
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(file, error) from None
        fault = columns.fault(facts.schema.to_arrow_schema())
        if fault is not None:
            raise self._damaged(f"{self._files[file]} {fault}")
        if facts.num_rows != self._sizes[file]:
            raise self._damaged(f"{self._files[file]} has {facts.num_rows} rows, not {self._sizes[file]}")
        return np.cumsum([facts.row_group(group).num_rows for group in range(facts.num_row_groups)])

    def _unreadable(self, file: int, error: pa.ArrowException | OSError) -> FlywheelError:
        path = self._files[file]
        # Whatever has no number is Arrow's own: bytes that are no Parquet.
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
            return DependencyError(f"{path} cannot be read: {error}.", hint=f"See to the storage of {path.parent}.")
        return self._damaged(f"{path} cannot be read: {error}")

    def _damaged(self, how: str) -> StateError:
        folder = self._files[0].parent
        return StateError(
            f"The data version in {folder} cannot be trained on: {how}.", hint=f"Delete {folder} and prepare it again."
        )
