"""One run of the real loop on any mesh, and what must be equal whatever the mesh: losses, norms, weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from safetensors.torch import load_file

from actors.training.config import TrainConfig
from actors.training.engine import Place
from actors.training.layout import Layout
from actors.training.loop import train
from tests.actors.training.small import Remembered, job, memory_feed, settings

STEPS = 20


@dataclass(frozen=True)
class Trace:
    """Loss and gradient norm of every step, and the weights at the end (of what learned)."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, np.ndarray]


def mesh_settings(**changes: Any) -> TrainConfig:
    """20 fp32 steps of 8 rows in micro-batches of one, clipped now and then; `changes` are whole sections."""
    plain: dict[str, Any] = {
        "optimizer": {"learning_rate": 5e-3, "global_batch_size": 8, "micro_batch_size": 1, "max_grad_norm": 1.0},
        "checkpoint": {"every_steps": STEPS},
        "steps": STEPS,
    }
    return settings(**{**plain, **changes})


def follow(place: Place, config: TrainConfig, base: Path, rows: pa.Table, folder: Path) -> Trace:
    """What one rank sees of a run, which goes on if `folder` has checkpoints; only rank 0 has losses.

    Work for `Gang.run`.
    """
    told = Remembered()
    layout = Layout.of(config.parallel, place.world_size)
    feed = memory_feed(rows, layout.data_rank(place.rank))
    outcome = train(job(config, base, folder, rows.num_rows), place, feed, told)
    if place.rank:
        return Trace([], [], {})
    weights = load_file(outcome.adapter / "adapter_model.safetensors")
    return Trace(told.losses, told.norms, {name: tensor.numpy() for name, tensor in weights.items()})


def assert_equal(found: Trace, wanted: Trace, *, rel: float = 1e-5) -> None:
    """The same trajectory: every loss and norm within `rel`, the weights as near as AdamW lets them be."""
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=rel)
    np.testing.assert_allclose(found.norms, wanted.norms, rtol=rel * 10)
    assert found.weights.keys() == wanted.weights.keys()
    for name, tensor in found.weights.items():
        np.testing.assert_allclose(tensor, wanted.weights[name], rtol=1e-3, atol=1e-4, err_msg=name)
