"""One run on any mesh, and what must be equal whatever the mesh: losses, norms, weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed
from torch.distributed.tensor import DTensor, distribute_tensor

from actors.training import engine, mesh, objectives, optimizer
from actors.training.config import ParallelConfig, TrainConfig
from actors.training.engine import Engine, Place
from actors.training.layout import Layout
from actors.training.steps import StepPlan
from tests.actors.training.small import memory_feed, settings

STEPS = 20


@dataclass(frozen=True)
class Trace:
    """Loss and gradient norm of every step, and the weights at the end (of what learned)."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, np.ndarray]


def mesh_settings(**changes: Any) -> TrainConfig:
    """20 fp32 steps of 8 rows in two micro-batches per rank, clipped now and then; `changes` are whole sections."""
    parallel = ParallelConfig(**changes.get("parallel", {}))
    micro = 8 // (parallel.workers.max // parallel.ranks_per_replica) // 2
    plain: dict[str, Any] = {
        "optimizer": {"learning_rate": 5e-3, "global_batch_size": 8, "micro_batch_size": micro, "max_grad_norm": 0.25},
        "checkpoint": {"every_steps": STEPS},
        "steps": STEPS,
    }
    return settings(**{**plain, **changes})


def follow(
    place: Place, config: TrainConfig, base: Path, rows: pa.Table, seen: Callable[[Engine], Any] | None = None
) -> tuple[Trace, Any]:
    """A run as the loop makes it, without feed and checkpoints, and what `seen` says of the engine at the end.

    Every rank has the whole trace. Work for `Gang.run`.
    """
    layout = Layout.of(config.parallel, place.world_size)
    sizes = config.optimizer
    plan = StepPlan(rows.num_rows, config.steps, sizes.global_batch_size, sizes.micro_batch_size, layout.data)
    trained = engine.build(config, base, base.name, place, layout)
    batches = memory_feed(rows, layout.data_rank(place.rank))(plan, 0)
    counts = layout.reader(place.rank) == place.rank
    trace, terms = Trace([], [], {}), objectives.count_terms(config)
    for step in range(plan.steps):
        torch.manual_seed(step)
        micro = [next(batches).to(place.device) for _ in range(plan.accumulation)]
        tokens = summed(place, sum(map(terms, micro)) if counts else 0)
        rate = optimizer.learning_rate(sizes, step, plan.steps)
        result = trained.step(micro, loss_tokens=tokens, learning_rate=rate)
        trace.losses.append(summed(place, result.loss_sum) / tokens)
        trace.norms.append(result.grad_norm)
    for name, tensor in trained.state().items():
        if name.startswith("weights/"):
            trace.weights[name.removeprefix("weights/")] = whole(tensor).cpu().numpy()
    said = seen(trained) if seen else None
    trained.close()
    return trace, said


def summed(place: Place, value: float) -> float:
    """Over all ranks."""
    total = torch.tensor(value, dtype=torch.float64, device=place.device)
    if place.world_size > 1:
        torch.distributed.all_reduce(total)
    return total.item()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of it, on every rank."""
    return mesh.whole(tensor).detach().clone()


def laid_out(values: np.ndarray, now: torch.Tensor) -> torch.Tensor:
    """`values` laid out as `now` is, which is what a loader of checkpoints gives."""
    full = torch.from_numpy(values)
    return distribute_tensor(full, now.device_mesh, now.placements) if isinstance(now, DTensor) else full


def assert_equal(found: Trace, wanted: Trace, *, rel: float = 1e-5) -> None:
    """The same trajectory: every loss and norm within `rel`, the weights as near as AdamW lets them be."""
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=rel)
    np.testing.assert_allclose(found.norms, wanted.norms, rtol=rel)
    assert found.weights.keys() == wanted.weights.keys()
    for name, tensor in found.weights.items():
        np.testing.assert_allclose(tensor, wanted.weights[name], rtol=1e-3, atol=1e-4, err_msg=name)
