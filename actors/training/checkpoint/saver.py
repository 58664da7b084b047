"""A worker's side of checkpoints: copy, commit behind training's back, go on from the last good one.

`save` returns when the state is copied aside; a thread on every rank then commits it, one at a time:

    shards of all ranks → their digests → adapter, ledger, position → manifest.json → COMMITTED

The threads agree over a gloo group of their own, never the training's (torch's asynchronous saves hang on a shared
one). Whoever is killed at any point leaves the checkpoint before as the last good one. A disk or a store that fails
stops that save, on all ranks, and not the run; only `finish(insist=True)` raises. On rank 0 a second thread tells the
registry and then deletes what the policy no longer keeps: nobody waits for either.
"""

import errno
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import torch
import torch.distributed

from actors.training.checkpoint import export, manifest, shards
from actors.training.checkpoint.aftermath import Aftermath
from actors.training.checkpoint.manifest import Checkpoint, FileFact, Found
from actors.training.checkpoint.storage import RunStorage
from actors.training.config import CheckpointConfig
from actors.training.job import Position, Protected
from cluster.errors import CapacityError, FlywheelError, TrainingError
from cluster.storage import DISK_FULL, digest_file

logger = logging.getLogger(__name__)

OnCommit = Callable[[Position, str, Mapping[str, float]], None]
"""Called on rank 0 with (position, the checkpoint's path or URI, metrics) once it is durable, in their order.

It is called again, later, if it raises a `FlywheelError`; so it may be called twice, and must be idempotent."""

_FULL: Final = DISK_FULL | {errno.EFBIG}
_SPARE_BYTES: Final = 16 << 20
_LONGEST_SAVE: Final = timedelta(hours=1)

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class ModelFacts:
    """What the weights in a checkpoint belong to; it lies there as `model.json`."""

    kind: str
    """`adapter`, or `model` if all weights learn."""
    base: str
    base_digest: str
    adapter_config: str | None = None
    """PEFT's `adapter_config.json`: with it, every checkpoint holds an adapter folder that can be registered."""


@dataclass(frozen=True)
class Settled:
    """How a save ended, the same on every rank. `seconds`: from the copy to the marker."""

    position: Position
    metrics: Mapping[str, float]
    uri: str
    seconds: float
    failed: FlywheelError | None = None


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on. `ledger` is the text that was saved with it."""

    position: Position
    ledger: str
    uri: str


class Checkpoints:
    """One run's checkpoints on one rank. Every method is called on every rank, in the same order."""

    def __init__(
        self,
        storage: RunStorage,
        *,
        run_id: str,
        policy: CheckpointConfig,
        rank: int = 0,
        world_size: int = 1,
        model: ModelFacts | None = None,
        durable: Callable[[int], None] | None = None,
        on_commit: OnCommit | None = None,
        protected: Protected | None = None,
    ) -> None:
        """`durable`: called on rank 0 with the step of each checkpoint, at once, and must neither wait nor fail.

        `protected`: asked on rank 0 which checkpoints must stay, besides those that the policy keeps.
        """
        self._storage = storage
        self._run_id = run_id
        self._rank = rank
        self._model = model
        self._agreement = _Agreement(world_size)
        self._durable = durable
        self._staging = shards.Staging()
        self._bytes_needed = 0
        self._flight: _Flight[Settled] | None = None
        self._job: Callable[[], Settled] | None = None
        self._noted: dict[str, float] = {}
        self._aftermath = Aftermath(storage, run_id, policy, on_commit, protected) if rank == 0 else None

    def resume(self, state: Mapping[str, torch.Tensor]) -> Resumed | None:
        """Fill `state` in place from the last good checkpoint, and say where that stands; None if there is none.

        One whose files are gone or changed is passed over, for the one before it. `TrainingError` if none of those
        that were committed is good, or if it is another run's or does not fit `state`.
        """
        damaged: set[str] = set()
        while True:
            choose = partial(self._choose, frozenset(damaged))
            found = self._agreement.each(choose if self._rank == 0 else _nothing)[0]
            if found is None:
                self._staging.prepare(state)
                return None
            checkpoint, ledger = found
            wrong = {file for files in self._agreement.each(partial(self._fill, checkpoint, state)) for file in files}
            if not wrong:
                break
            damaged.add(checkpoint.name)
            why = f"{', '.join(sorted(wrong))} not as saved, when the run was to go on from it"
            self._agreement.each(partial(self._condemn, checkpoint.name, why) if self._rank == 0 else _nothing)
        self._staging.prepare(state)
        if self._aftermath is not None:
            # Whoever died after these may not have told of them.
            for each in manifest.committed(self._storage):
                self._tell(each.position, each.name, each.metrics, resumed=each.name == checkpoint.name)
        return Resumed(checkpoint.position, ledger, self._uri(checkpoint.name))

    def save(
        self,
        state: Mapping[str, torch.Tensor],
        position: Position,
        *,
        ledger: str = "",
        metrics: Mapping[str, float] | None = None,
    ) -> Settled | None:
        """Copy `state` and return; it is committed behind. Returns how the save before this one ended, None if none.

        One save is in flight: while the one before is not committed, this one waits for it.
        """
        began_s = time.perf_counter()
        before = self._settle()
        waited_s = time.perf_counter()
        copied = self._staging.copy(state)
        self._job = partial(self._commit, position, ledger, dict(metrics or {}), time.perf_counter())
        self._flight = _Flight(self._job)
        self._noted["checkpoint_stall_s"] = time.perf_counter() - began_s
        self._noted["checkpoint_wait_s"] = waited_s - began_s
        self._noted["checkpoint_copied_bytes"] = float(copied)
        return before

    def finish(self, *, insist: bool = False) -> Settled | None:
        """Wait for the save in flight; returns how it ended, None if there was none.

        `insist`: it is the run's last. One that failed is tried once more, the registry must have heard of it, and
        what still fails is raised (`CapacityError` for a full disk).
        """
        settled = self._settle()
        if settled is not None and settled.failed is not None and insist and self._job is not None:
            self._flight = _Flight(self._job)
            settled = self._settle()
            if settled is not None and settled.failed is not None:
                raise settled.failed
        if self._aftermath and insist:
            self._aftermath.finish()
        return settled

    def take_metrics(self) -> dict[str, float]:
        """What there is to measure since the last call: the stall of the last save, the end of the one before."""
        taken, self._noted = self._noted, {}
        return taken

    def _settle(self) -> Settled | None:
        if self._flight is None:
            return None
        settled = self._flight.result()
        self._flight = None
        self._noted["checkpoint_failed"] = float(settled.failed is not None)
        self._noted["checkpoint_commit_s"] = settled.seconds
        return settled

    def _commit(self, position: Position, ledger: str, metrics: dict[str, float], began_s: float) -> Settled:
        """The committing thread's work."""
        name = manifest.name_of(position.step)
        scratch: Path | None = None
        failed: FlywheelError | None = None
        try:
            if not self._bytes_needed:
                whole: dict[str, int] = {}
                for each in self._agreement.each(self._staging.total_bytes):
                    whole |= each
                self._bytes_needed = sum(whole.values())
                if self._model is not None and self._model.adapter_config is not None:  # it has the weights once more
                    weights = [size for name, size in whole.items() if name.startswith(export.WEIGHTS)]
                    self._bytes_needed += sum(weights)
            token = self._agreement.each(partial(self._begin, name) if self._rank == 0 else _nothing)[0]
            if token is not None:
                scratch = self._storage.scratch(name, token, self._rank)
                self._write(scratch, name, position, ledger, metrics)
        except (OSError, FlywheelError) as error:
            if scratch is not None:
                self._storage.discard(scratch, name, self._rank)
            failed = self._verdict(name, error)
            if self._rank == 0:
                logger.warning("the checkpoint is not saved, training goes on: %s", failed)
        else:
            self._tell(position, name, metrics)
        return Settled(position, metrics, self._uri(name), time.perf_counter() - began_s, failed)

    def _begin(self, name: str) -> str | None:
        """Rank 0: make room for the checkpoint. None if it is there already, whole: a run repeats itself exactly."""
        if name in self._storage.listing():
            if manifest.verify(self._storage, name).condition == "committed":
                return None
            self._storage.remove(name)
        free = self._storage.free_bytes()
        if free is not None and free < self._bytes_needed + _SPARE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.urandom(4).hex()

    def _write(self, scratch: Path, name: str, position: Position, ledger: str, metrics: dict[str, float]) -> None:
        durable = self._storage.durable
        written = shards.write(self._staging, scratch, self._agreement.group, durable=durable)

        def store() -> dict[str, FileFact]:
            self._storage.store(scratch, name, written)
            return written

        files: dict[str, FileFact] = {}
        for each in self._agreement.each(store):
            files |= each
        complete = partial(self._complete, scratch, name, files, position, ledger, metrics)
        self._agreement.each(complete if self._rank == 0 else _nothing)
        shutil.rmtree(scratch, ignore_errors=True)  # where sealing was a rename, it is gone

    def _complete(
        self,
        scratch: Path,
        name: str,
        files: dict[str, FileFact],
        position: Position,
        ledger: str,
        metrics: dict[str, float],
    ) -> None:
        """Rank 0: all that is no shard, and the marker."""
        if self._model is not None:
            if self._model.adapter_config is not None:
                with self._storage.opened(name, scratch) as fetch:
                    export.write_adapter(fetch(files), scratch / manifest.ADAPTER, self._model.adapter_config)
            facts = {key: value for key, value in asdict(self._model).items() if key != "adapter_config"}
            (scratch / manifest.MODEL).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        (scratch / manifest.LEDGER).write_text(ledger, encoding="utf-8")
        noted = manifest.position_text(position, metrics, datetime.now(UTC))
        (scratch / manifest.POSITION).write_text(noted, encoding="utf-8")
        beside = [path for path in (scratch, scratch / manifest.ADAPTER) if path.is_dir()]
        ours = {
            path.relative_to(scratch).as_posix(): FileFact(path.stat().st_size, digest_file(path))
            for folder in beside
            for path in folder.iterdir()
            if path.is_file() and path.relative_to(scratch).as_posix() not in files
        }
        listed = manifest.manifest_text(files | ours)
        (scratch / manifest.MANIFEST).write_text(listed, encoding="utf-8")
        self._storage.store(scratch, name, [*ours, manifest.MANIFEST])
        self._storage.seal(scratch, name, manifest.marker_text(listed))

    def _choose(self, damaged: frozenset[str]) -> tuple[Checkpoint, str] | None:
        """Rank 0: the checkpoint to go on from, and its ledger."""
        if not damaged:
            self._storage.clear()
        chosen = manifest.latest(self._storage, without=damaged, passed_over=_note_damage)
        if chosen is not None:
            manifest.require(chosen, run_id=self._run_id)
            # Whether it is as it was saved, `_fill` finds out.
            return chosen, self._storage.read(chosen.name, manifest.LEDGER).decode(errors="replace")
        hurt = {found.name for found in manifest.look(self._storage) if found.condition == "damaged"} | damaged
        if hurt:
            raise TrainingError(
                f"No checkpoint of run {self._run_id} is good: {', '.join(sorted(hurt))} damaged.",
                hint=f"See flywheel checkpoint list {self._run_id}; restore the files, or start a new run.",
            )
        return None

    def _fill(self, checkpoint: Checkpoint, state: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
        """Load this rank's part; the files that are not what was saved, if there are any."""
        with self._storage.opened(checkpoint.name) as fetch:
            try:
                small = [manifest.METADATA, manifest.LEDGER]
                wrong = manifest.changed(fetch(small), checkpoint, small)
                if wrong:
                    return wrong  # and so .metadata, which is a pickle, is not opened
                parts = sorted(shards.needed(fetch([]), state))
                wrong = manifest.changed(fetch(parts), checkpoint, parts)
                if wrong:
                    return wrong
            except manifest.NO_FILE as error:
                return (str(error.filename or error),)
            except OSError as error:  # which says nothing of the checkpoint: the disk here, or who may read
                raise self._unreadable(checkpoint.name, error) from None
            shards.read(fetch([]), state)
        return ()

    def _condemn(self, name: str, why: str) -> None:
        logger.warning("%s is damaged and passed over: %s", name, why)
        self._storage.condemn(name, why)  # so that the driver, which reads no contents, passes it over too

    def _tell(self, position: Position, name: str, metrics: Mapping[str, float], *, resumed: bool = False) -> None:
        if self._aftermath is None:
            return
        if self._durable is not None:
            self._durable(position.step)
        self._aftermath.committed(position, self._uri(name), metrics, resumed=resumed)

    def _verdict(self, name: str, error: OSError | FlywheelError) -> FlywheelError:
        if isinstance(error, OSError) and error.errno in _FULL:
            free = self._storage.free_bytes()
            return CapacityError(
                f"{name} of run {self._run_id} cannot be saved in {self._storage.uri}: {error.strerror}; "
                f"{_mib(self._bytes_needed)} are needed, {_mib(free or 0)} are free.",
                hint="Free space there, lower checkpoint.keep, or set checkpoint.storage to a larger disk.",
            )
        if isinstance(error, OSError):
            return TrainingError(
                f"{name} of run {self._run_id} cannot be saved in {self._storage.uri}: {error}.",
                hint="Check the disk and its permissions, or set checkpoint.storage to another folder.",
            )
        return error

    def _unreadable(self, name: str, error: OSError) -> FlywheelError:
        if error.errno in _FULL:
            return CapacityError(
                f"There is no room to read {name} of run {self._run_id} from {self._storage.uri}: {error}.",
                hint="Free some disk there.",
            )
        return TrainingError(
            f"{name} of run {self._run_id} cannot be read in {self._storage.uri}: {error}.",
            hint="Make its files readable, or move it away to go on from the one before.",
        )

    def _uri(self, name: str) -> str:
        return f"{self._storage.uri}/{name}"


class _Flight(Generic[_Value]):
    """Work in a thread of its own. Python does not wait for it when the process ends."""

    def __init__(self, work: Callable[[], _Value]) -> None:
        self._value: _Value
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    def result(self) -> _Value:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value

    def _run(self, work: Callable[[], _Value]) -> None:
        try:
            self._value = work()
        except BaseException as error:  # noqa: BLE001 (raised where the result is asked for)
            self._error = error


class _Agreement:
    """All ranks know what each of them has found out, or that one of them has failed."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.group = (
            torch.distributed.new_group(backend="gloo", timeout=_LONGEST_SAVE, group_desc="checkpoints")
            if world_size > 1
            else None
        )

    def each(self, work: Callable[[], _Value]) -> list[_Value]:
        """What `work` gives on each rank, on every rank; the first rank's error is raised on all."""
        mine: tuple[_Value | None, Exception | None]
        try:
            mine = (work(), None)
        except (OSError, FlywheelError) as error:
            mine = (None, error)
        every: list[Any] = [mine]
        if self.group is not None:
            every = [None] * self._world_size
            torch.distributed.all_gather_object(every, mine, group=self.group)
        for _, failure in every:
            if failure is not None:
                raise failure
        return [value for value, _ in every]


def _nothing() -> Any:
    """What the other ranks do while rank 0 works."""
    return None


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _note_damage(found: Found) -> None:
    if found.condition == "damaged":
        logger.warning("%s is damaged and passed over: %s", found.name, found.why)
