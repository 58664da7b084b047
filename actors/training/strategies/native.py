"""The engine on torch's own parallelism: every rank runs the whole depth of the model.

Knows gradients and their exchange. How a family of models is cut for the mesh stands in `models/`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from actors.training import adapter, clipping, context, mesh, objectives, optimizer
from actors.training.batching import MicroBatch
from actors.training.config import TrainConfig
from actors.training.engine import Place, StepResult
from actors.training.layout import Layout
from actors.training.models import recipe


class NativeEngine:
    """DDP, FSDP2 and HSDP, with tensor parallelism inside. See `engine.Engine`."""

    def __init__(self, config: TrainConfig, base: Path, base_name: str, place: Place, layout: Layout) -> None:
        self._device = place.device
        self.model, objective = self._learner(config, base, base_name)
        spread = mesh.build(layout, place.device) if place.world_size > 1 else None
        if layout.context > 1 and spread is not None:
            objective.context = context.prepare(self.model, spread.get_group("context"), layout.tensor)
        self._module = recipe(self.model, layout, config.objective.kind)(
            objective, config, layout, place.device, spread
        )
        self._module.train()
        self._learning = adapter.learning(self.model)
        self._adamw = optimizer.build(config.optimizer, self._learning.values())
        self._max_norm = config.optimizer.max_grad_norm
        self._all_learn = config.adapter.kind == "none"
        self._exchanges = True
        self._means_over = layout.data * layout.context
        self._tells_loss = layout.place_of(place.rank)["tensor"] == 0  # its peers have the same one

    def _learner(self, config: TrainConfig, base: Path, base_name: str) -> tuple[Any, torch.nn.Module]:
        """The model that learns, and the objective around it."""
        model = adapter.trainable(config, base, base_name, self._device)
        return model, objectives.build(config, model)

    def step(self, micro: Sequence[MicroBatch], *, loss_tokens: float, learning_rate: float) -> StepResult:
        optimizer.set_learning_rate(self._adamw, learning_rate)
        # DDP and FSDP average over the ranks that see different tokens; times their number makes it the sum.
        summed = self._backward(micro, self._means_over / loss_tokens)
        norm = clipping.clip(self._learning.values(), self._max_norm)
        self._adamw.step()
        self._adamw.zero_grad()
        told, norm_told = torch.stack([summed, norm]).tolist()  # the step's only wait for the device
        return StepResult(told if self._tells_loss else 0.0, norm_told)

    def _backward(self, micro: Sequence[MicroBatch], scale: float) -> torch.Tensor:
        """Add the gradients of the summed loss × `scale` to those of the parameters; this rank's part of that sum."""
        summed = torch.zeros((), device=self._device)
        for index, batch in enumerate(micro):
            with self._exchanging(last=index == len(micro) - 1):
                loss = self._module(batch.input_ids, batch.labels, batch.position_ids)
                (loss * scale).backward()
            summed += loss.detach()
        return summed

    def state(self) -> dict[str, torch.Tensor]:
        optimizer.begin(self._adamw)
        return optimizer.state(self._adamw, self._learning)

    def load(self, state: Mapping[str, torch.Tensor], step: int) -> None:
        optimizer.load(self._adamw, self._learning, state, step)

    def close(self) -> None:
        return None

    @contextmanager
    def _exchanging(self, *, last: bool) -> Iterator[None]:
        """Gradients travel with the last micro-batch only, unless keeping them whole until then would cost memory."""
        if isinstance(self._module, FSDPModule) and last != self._exchanges:
            self._exchanges = last  # each call walks over all modules
            if self._all_learn:
                self._module.set_requires_all_reduce(last)  # shards are summed each time, replicas once
            else:
                self._module.set_requires_gradient_sync(last)
        if isinstance(self._module, DistributedDataParallel) and not last:
            with self._module.no_sync():
                yield
        else:
            yield
