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

from actors.training import adapter
from actors.training.job import Position
from actors.training.strategies import Strategy
from cluster.errors import TrainingError
from cluster.storage import publish

ADAPTER = "adapter"
_OPTIMIZER = "optimizer.safetensors"
_POSITION = "position.json"
_FORMAT = 1


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def save(
    run_folder: Path, position: Position, model: Any, optimizer: torch.optim.Optimizer, strategy: Strategy, *, rank: int
) -> Path:
    """Publish the checkpoint of `position.step` and return its folder. Called on every rank; rank 0 writes."""
    weights = {name: strategy.whole(tensor) for name, tensor in adapter.state(model).items()}
    moments = {
        f"{key}/{name}": strategy.whole(value).detach().cpu().contiguous()
        for name, parameter in _learning(model).items()
        for key, value in optimizer.state[parameter].items()
    }
    folder = run_folder / name_of(position.step)
    if rank == 0:
        with publish(folder) as scratch:
            adapter.save(model, weights, scratch / ADAPTER)
            save_file(moments, scratch / _OPTIMIZER)
            facts = {"format": _FORMAT, **asdict(position)}
            (scratch / _POSITION).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return folder


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


def load_adapter(folder: Path, model: Any) -> None:
    """Weights into `model`, which is not yet wrapped."""
    adapter.load(model, folder / ADAPTER)


def load_optimizer(folder: Path, model: Any, optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
    """AdamW's moments into `optimizer`. Called on every rank, after wrapping."""
    stored = load_file(folder / _OPTIMIZER)
    for name, parameter in _learning(model).items():
        found = {key.partition("/")[0]: value for key, value in stored.items() if key.partition("/")[2] == name}
        optimizer.state[parameter] = {
            # AdamW keeps its own count of steps as a plain scalar on the CPU.
            key: value if value.ndim == 0 else strategy.part(value, parameter)
            for key, value in found.items()
        }


def _learning(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
