"""What ranks tell each other of rows: those that work on the same ones share them, and all account for theirs."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed

from actors.training.batching import MicroBatch
from actors.training.layout import Layout
from actors.training.ledger import Ledger
from actors.training.steps import COLUMNS
from cluster.errors import TrainingError

_FAILED, _ENDED, _BATCH = range(3)


def group(layout: Layout) -> Any:
    """The process group of those who share this rank's rows. Called on every rank.

    Over gloo whatever the model talks over: rows lie in the memory of the CPU until a step takes them, and a rank
    that waits for rows must not hold up its GPU.
    """
    members = [
        [other for other in range(layout.world_size) if layout.data_rank(other) == share]
        for share in range(layout.data)
    ]
    own, _ = torch.distributed.new_subgroups_by_enumeration(members, backend="gloo")
    return own


def shared(batches: Iterator[MicroBatch] | None, *, reader: int, group: Any) -> Iterator[MicroBatch]:
    """The micro-batches of the rank `reader` on every rank of `group`; `batches` is None on those that only receive.

    All micro-batches have one shape. Receivers know no `origin`. If reading fails, it fails on every rank.
    """
    return _sent(batches, reader, group) if batches is not None else _received(reader, group)


def gathered(segment: Ledger, *, rank: int, world_size: int) -> list[Ledger]:
    """What all ranks have noted, on rank 0; nothing on the others. Called on every rank."""
    if world_size == 1:
        return [segment]
    every: list[Ledger] | None = [segment] * world_size if rank == 0 else None
    torch.distributed.gather_object(segment, every)
    return every or []


def _sent(batches: Iterator[MicroBatch], reader: int, group: Any) -> Iterator[MicroBatch]:
    shape: torch.Size | None = None

    def tell(state: int, batch: MicroBatch | None = None) -> None:
        nonlocal shape
        if shape is None:
            shape = batch.input_ids.shape if batch else torch.Size((0, 0))
            torch.distributed.broadcast(torch.tensor(shape), reader, group)
        message = torch.zeros(1 + len(COLUMNS) * shape.numel(), dtype=torch.int64)
        message[0] = state
        if batch:
            torch.cat([getattr(batch, name).flatten() for name in COLUMNS], out=message[1:])
        torch.distributed.broadcast(message, reader, group)

    while True:
        try:
            batch = next(batches)
            if shape is not None and batch.input_ids.shape != shape:
                raise TrainingError(f"A micro-batch is {tuple(batch.input_ids.shape)}, not {tuple(shape)}.")
        except StopIteration:
            tell(_ENDED)
            return
        except BaseException:
            tell(_FAILED)
            raise
        tell(_BATCH, batch)
        yield batch


def _received(reader: int, group: Any) -> Iterator[MicroBatch]:
    size = torch.zeros(2, dtype=torch.int64)
    torch.distributed.broadcast(size, reader, group)
    shape = torch.Size(size.tolist())
    while True:
        message = torch.empty(1 + len(COLUMNS) * shape.numel(), dtype=torch.int64)
        torch.distributed.broadcast(message, reader, group)
        if message[0] == _FAILED:
            # Said again elsewhere with its cause; whether another try helps is for that error to say.
            raise TrainingError(f"Rank {reader}, which reads the rows of this rank, failed.", retryable=True)
        if message[0] == _ENDED:
            return
        yield MicroBatch(**dict(zip(COLUMNS, message[1:].view(len(COLUMNS), *shape).unbind(), strict=True)))
