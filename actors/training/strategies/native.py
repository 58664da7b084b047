"""The engine on torch's own parallelism: every rank runs the whole depth of the model.

Knows gradients and their exchange. How a family of models is cut for the mesh stands in `models/`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from actors.training import adapter, mesh, objectives, optimizer
from actors.training.batching import MicroBatch
from actors.training.config import TrainConfig
from actors.training.engine import Place, StepResult
from actors.training.layout import Layout
from actors.training.models import dense


class NativeEngine:
    """DDP, FSDP2 and HSDP. See `engine.Engine`."""

    def __init__(self, config: TrainConfig, base: Path, base_name: str, place: Place, layout: Layout) -> None:
        self.model = adapter.trainable(config, base, base_name, place.device)
        self._config = config
        self._layout = layout
        objective = objectives.build(config, self.model).to(place.device)
        self._module = (
            dense.parallelize(objective, config, layout, mesh.build(layout, place.device))
            if place.world_size > 1
            else objective
        )
        self._module.train()
        self._learning = adapter.learning(self.model)
        self._adamw = optimizer.build(config.optimizer, self._learning.values())

    def step(self, micro: Sequence[MicroBatch], *, loss_tokens: float, learning_rate: float) -> StepResult:
        optimizer.set_learning_rate(self._adamw, learning_rate)
        # DDP and FSDP average over the data ranks; times their number makes it the sum.
        scale = self._layout.data / loss_tokens
        summed = 0.0
        with adapter.same_dtype_inputs(self.model):
            for index, batch in enumerate(micro):
                with self._exchanging(index == len(micro) - 1):
                    loss = self._module(batch.input_ids, batch.labels, batch.position_ids)
                    (loss * scale).backward()
                summed += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self._learning.values(), self._config.optimizer.max_grad_norm)
        self._adamw.step()
        self._adamw.zero_grad()
        return StepResult(summed, _whole(norm).item())

    def state(self) -> dict[str, torch.Tensor]:
        optimizer.begin(self._adamw)
        return optimizer.state(self._adamw, self._learning)

    def load(self, state: Mapping[str, torch.Tensor], step: int) -> None:
        optimizer.load(self._adamw, self._learning, state, step)

    def close(self) -> None:
        return None

    @contextmanager
    def _exchanging(self, last: bool) -> Iterator[None]:
        """Gradients travel with the last micro-batch only."""
        if isinstance(self._module, FSDPModule):
            self._module.set_requires_gradient_sync(last)
        if isinstance(self._module, DistributedDataParallel) and not last:
            with self._module.no_sync():
                yield
        else:
            yield


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
