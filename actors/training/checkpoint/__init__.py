"""A checkpoint: adapter, optimizer and position, enough to go on at the exact step; published whole or not at all.

    step-000040/
        adapter/                 what PEFT and vLLM load, and what becomes a version
        optimizer.safetensors    AdamW's moments under the parameters' names, unsharded
        position.json            the step, and facts to read

The learning rate and the random numbers are functions of the step and the seed, so the position restores
them too. Nothing here is a pickle. Tensors are stored whole: another strategy or world size can load them.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from actors.training import adapter
from actors.training.engine import Engine
from actors.training.job import Position
from cluster.errors import TrainingError
from cluster.storage import publish

ADAPTER = "adapter"
_OPTIMIZER = "optimizer.safetensors"
_POSITION = "position.json"
_LEDGER = "ledger.json"
_WEIGHTS = "weights/"
_FORMAT = 1


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def save(run_folder: Path, position: Position, engine: Engine, *, rank: int, ledger: str) -> Path:
    """Publish the checkpoint of `position.step` and return its folder. Called on every rank; rank 0 writes."""
    whole = {name: _whole(tensor).detach().cpu().contiguous() for name, tensor in engine.state().items()}
    weights = {name.removeprefix(_WEIGHTS): tensor for name, tensor in whole.items() if name.startswith(_WEIGHTS)}
    moments = {name: tensor for name, tensor in whole.items() if not name.startswith(_WEIGHTS)}
    folder = run_folder / name_of(position.step)
    if rank == 0:
        with publish(folder) as scratch:
            adapter.save(engine.model, weights, scratch / ADAPTER)
            save_file(moments, scratch / _OPTIMIZER)
            facts = {"format": _FORMAT, **asdict(position)}
            (scratch / _LEDGER).write_text(ledger, encoding="utf-8")
            (scratch / _POSITION).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return folder


def load(folder: Path, engine: Engine, *, run_id: str) -> Position:
    """Bring `engine` to where the checkpoint in `folder` stands. Called on every rank."""
    position = read_position(folder, run_id=run_id)
    stored = load_file(folder / _OPTIMIZER)
    stored |= {_WEIGHTS + name: tensor for name, tensor in load_file(folder / ADAPTER / adapter.WEIGHTS).items()}
    engine.load({name: _part(stored[name], live) for name, live in engine.state().items()}, position.step)
    return position


def read_ledger(folder: Path) -> str:
    """What was saved as `ledger` with the checkpoint in `folder`."""
    try:
        return (folder / _LEDGER).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TrainingError(f"The checkpoint in {folder} cannot be read: {error}.", hint="Start a new run.") from None


def read_position(folder: Path, *, run_id: str) -> Position:
    """Where the checkpoint in `folder` stands; `TrainingError` if it cannot be gone on from."""
    try:
        facts: dict[str, Any] = json.loads((folder / _POSITION).read_text(encoding="utf-8"))
        written_as = facts.pop("format")
        position = Position(**facts)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise TrainingError(f"The checkpoint in {folder} cannot be read: {error}.", hint="Start a new run.") from None
    if written_as != _FORMAT or position.run_id != run_id:
        raise TrainingError(
            f"The checkpoint in {folder} is of run {position.run_id} in format {written_as}, "
            f"not of run {run_id} in format {_FORMAT}.",
            hint="Start a new run.",
        )
    return position


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _part(stored: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor, laid out like `live`."""
    stored = stored.to(live.device)
    if isinstance(live, DTensor):
        return distribute_tensor(stored, live.device_mesh, live.placements)
    return stored
