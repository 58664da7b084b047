"""What the checkpoint tests share: a small state of known numbers, whole or spread over ranks, and its checkpoints."""

import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from actors.training import mesh
from actors.training.checkpoint.saver import Checkpoints, ModelFacts
from actors.training.checkpoint.storage import FolderStorage, RunStorage
from actors.training.config import CheckpointConfig
from actors.training.engine import Place
from actors.training.job import Position

RUN = "tiny-1"
NAMES = ("base_model.model.q.lora_A.weight", "base_model.model.q.lora_B.weight", "base_model.model.v.lora_A.weight")
MODEL = ModelFacts("adapter", "tiny", "ab" * 32, '{"peft_type": "LORA"}\n')


def whole(step: int, rows: int = 5) -> dict[str, torch.Tensor]:
    """All tensors after `step` steps: numbers that say which tensor, place and step they are of."""
    return {
        f"{kind}/{name}": torch.arange(rows * 3, dtype=torch.float32).reshape(rows, 3) + 1000 * step + 100 * place
        for place, (kind, name) in enumerate(
            (kind, name) for kind in ("weights", "exp_avg", "exp_avg_sq") for name in NAMES
        )
    }


def spread(place: Place, step: int, *, along: int = 0) -> dict[str, torch.Tensor]:
    """The same as DTensors: shards, one tensor that every rank has, and one that only the last rank has (a stage's)."""
    mesh = init_device_mesh("cpu", (place.world_size,))
    state: dict[str, torch.Tensor] = {}
    for index, (name, tensor) in enumerate(whole(step).items()):
        if index == 1:
            state[name] = distribute_tensor(tensor, mesh, [Replicate()])
        elif index == 2:
            state[name] = tensor
        elif index == 3:
            if place.rank == place.world_size - 1:
                state[name] = tensor
        else:
            state[name] = distribute_tensor(tensor, mesh, [Shard(along)])
    return state


def blank(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same layout without the numbers."""
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def assert_equal(found: Mapping[str, torch.Tensor], step: int) -> None:
    """Each tensor of `found`, or this rank's part of it, is that of `whole(step)`. Collective for DTensors."""
    wanted = whole(step)
    for name, tensor in found.items():
        assert mesh.whole(tensor).equal(wanted[name]), name


def at(step: int, run_id: str = RUN) -> Position:
    return Position(run_id, step=step, rows=4 * step, loss_first=5.0, loss_last=1 / step, loss_tokens=10 * step)


def checkpoints(
    storage: RunStorage | Path,
    place: Place | None = None,
    *,
    keep: int = 3,
    policy: Mapping[str, Any] | None = None,
    **more: Any,
) -> Checkpoints:
    """Those of run `tiny-1`."""
    return Checkpoints(
        FolderStorage(storage) if isinstance(storage, Path) else storage,
        run_id=RUN,
        policy=CheckpointConfig.model_validate({"keep": keep, **(policy or {})}),
        rank=place.rank if place else 0,
        world_size=place.world_size if place else 1,
        **{"model": MODEL, **more},
    )


def save(
    mine: Checkpoints, *steps: int, state: Callable[[int], Mapping[str, torch.Tensor]] = whole, insist: bool = True
) -> None:
    """Save each step and wait for all."""
    for step in steps:
        mine.save(state(step), at(step), ledger=f"ledger of {step}", metrics={"loss": 1 / step})
    mine.finish(insist=insist)


def resumed_step(storage: RunStorage | Path, state: dict[str, torch.Tensor] | None = None) -> int | None:
    """Where a new process goes on, with the right numbers."""
    state = state if state is not None else blank(whole(1))
    found = checkpoints(storage).resume(state)
    if found is None:
        return None
    assert found.ledger == f"ledger of {found.position.step}"
    assert_equal(state, found.position.step)
    return found.position.step


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes: the kernel's own refusal in the middle of a write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
