"""The engine whose ranks share the layers: each holds a range of them, and micro-batches pass from rank to rank.

Knows schedules, and what the stages of one model must tell each other: the norm of the whole gradient, and the
gradient of an embedding that two of them hold. How a model is cut stands in `models/stages.py`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from actors.training import adapter, clipping, expert, mesh, objectives, optimizer
from actors.training.batching import MicroBatch
from actors.training.config import TrainConfig
from actors.training.engine import Place, StepResult
from actors.training.layout import Layout
from actors.training.models import dense, stages
from actors.training.objectives import sft
from actors.training.steps import COLUMNS
from cluster.errors import TrainingError


class PipelineEngine:
    """1F1B or interleaved 1F1B, with DDP, FSDP or HSDP around each stage. See `engine.Engine`.

    With an embedding that is also the output head and learns, first and last stage hold a copy each. Both see
    the sum of their two gradients, so AdamW keeps them equal; the first stage's is the one that counts.
    """

    def __init__(self, config: TrainConfig, base: Path, base_name: str, place: Place, layout: Layout) -> None:
        self.model = adapter.trainable(config, base, base_name, place.device)
        objectives.build(config, self.model)  # refuses a model that it does not fit
        expert.refuse_tensor(self.model, layout, hint="Use parallel.pipeline with strategy fsdp.")
        self._config = config
        self._layout = layout
        self._device = place.device
        self._mesh = mesh.build(layout, place.device)
        self._group = self._mesh.get_group("pipeline")
        self._coordinate = layout.place_of(place.rank)["pipeline"]
        self._tells_loss = layout.place_of(place.rank)["tensor"] == 0

        ranges = 2 if config.parallel.schedule == "interleaved" else 1
        self._count = ranges * layout.pipeline
        self._mine = [self._coordinate + layout.pipeline * each for each in range(ranges)]
        embedding, head = self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight
        self._hidden = (embedding.shape[1], embedding.dtype)
        tied = embedding is head and embedding.requires_grad
        cut = stages.cut(self.model, self._mine, self._count, sft.summed_loss, config.precision)
        del embedding, head  # of the ranks that lack a stage for them, the last references
        self._modules = [self._spread(stage, place.device) for stage in cut]
        self.model.train()
        for module in self._modules:
            module.train()

        self._learning = adapter.learning(self.model)
        self._adamw = optimizer.build(config.optimizer, self._learning.values())
        self._twin = self._take_twin() if tied else None
        self._schedule: Any = None
        self._shape: tuple[int, ...] = ()
        self._scale = 1.0

    def step(self, micro: Sequence[MicroBatch], *, loss_tokens: float, learning_rate: float) -> StepResult:
        optimizer.set_learning_rate(self._adamw, learning_rate)
        # DDP and FSDP average over the data ranks; times their number makes it the sum.
        self._scale = self._layout.data / loss_tokens
        batch = _together(micro)
        schedule = self._schedule_for(len(micro), batch.input_ids.shape)
        first, last = 0 in self._mine, self._count - 1 in self._mine
        losses: list[torch.Tensor] = []
        schedule.step(
            *([batch.input_ids] if first else []),
            position_ids=batch.position_ids,
            labels=batch.labels,
            target=batch.labels if last else None,  # unused, but asked for
            losses=losses if last else None,
            return_outputs=False,
        )
        summed = float(torch.stack(losses).detach().double().sum()) / self._scale if last and self._tells_loss else 0.0
        norm = float(self._clip())
        self._adamw.step()
        self._adamw.zero_grad()
        return StepResult(summed, norm)

    def state(self) -> dict[str, torch.Tensor]:
        optimizer.begin(self._adamw)
        return optimizer.state(self._adamw, self._learning)

    def load(self, state: Mapping[str, torch.Tensor], step: int) -> None:
        optimizer.load(self._adamw, self._learning, state, step)
        if self._twin is not None:
            moments = self._adamw.state[self._twin]
            moments["step"].fill_(step)
            for tensor in (self._twin.detach(), *(moments[name] for name in optimizer.MOMENTS)):
                theirs = self._exchange(tensor)
                if self._coordinate:
                    mesh.local(tensor).copy_(theirs)

    def close(self) -> None:
        return None

    def _spread(self, stage: stages.Stage, device: torch.device) -> torch.nn.Module:
        """`stage` over the ranks that share it: the recipe of `models/dense.py`, in its order."""
        layers = list(stage.decoder.layers)
        if self._layout.tensor > 1:
            dense.share_matrices(self.model, layers, self._mesh["tensor"])
        if self._config.activation_checkpointing:
            dense.checkpoint_activations(self.model)
        if self._config.compile:
            dense.compile_layers(layers)
        if self._layout.data == 1:
            return stage.to(device)
        spread = dense.spread_over_tokens(stage, layers, self._config, self._layout, device, self._mesh)
        if isinstance(spread, FSDPModule):
            # Gathered once a step: again for each micro-batch would cost more than the pipeline saves.
            spread.set_reshard_after_forward(reshard_after_forward=False)
        return spread

    def _schedule_for(self, count: int, shape: torch.Size) -> Any:
        """The schedule of `count` micro-batches of `shape` [count · B, T], with the buffers that they pass through."""
        if self._shape != (count, *shape):
            self._shape = (count, *shape)
            width, dtype = self._hidden
            rows, length = shape[0] // count, shape[1]
            # Given the shapes, torch has no need to run a batch through all stages to find them.
            tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
            hidden = torch.empty(rows, length, width, dtype=dtype, device="meta", requires_grad=True)
            loss = torch.empty((), device="meta", requires_grad=True)
            ready = [
                PipelineStage(
                    module,
                    index,
                    self._count,
                    self._device,
                    input_args=hidden if index else tokens,
                    output_args=hidden if index < self._count - 1 else loss,
                    group=self._group,
                )
                for index, module in zip(self._mine, self._modules, strict=True)
            ]
            # The loss is a sum already: nothing to divide by the number of micro-batches.
            self._schedule = (
                ScheduleInterleaved1F1B(ready, count, self._scaled, scale_grads=False)
                if len(ready) > 1
                else Schedule1F1B(ready[0], count, self._scaled, scale_grads=False)
            )
        return self._schedule

    def _scaled(self, summed_loss: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
        return summed_loss * self._scale

    def _take_twin(self) -> torch.nn.Parameter | None:
        """The copy that this rank holds of the tied embedding; the last stage's is no parameter with a name."""
        if self._count - 1 in self._mine:
            head = self.model.get_output_embeddings().weight
            name = next(name for name, parameter in self._learning.items() if parameter is head)
            return self._learning.pop(name)
        return self.model.get_input_embeddings().weight if 0 in self._mine else None

    def _exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the other one of first and last rank gives for its `tensor`, of the same shape; local parts both."""
        mine = mesh.local(tensor).contiguous()
        theirs = torch.empty_like(mine)
        peer = 0 if self._coordinate else self._layout.pipeline - 1
        operations = [
            torch.distributed.P2POp(torch.distributed.isend, mine, group=self._group, group_peer=peer),
            torch.distributed.P2POp(torch.distributed.irecv, theirs, group=self._group, group_peer=peer),
        ]
        for work in torch.distributed.batch_isend_irecv(operations):
            work.wait()
        return theirs

    def _clip(self) -> torch.Tensor:
        """The norm of the whole gradient, which is clipped by it."""
        limit = self._config.optimizer.max_grad_norm
        twin = mesh.local(self._twin.grad) if self._twin is not None and self._twin.grad is not None else None
        if twin is not None:
            twin.add_(self._exchange(twin))  # a + b = b + a, bit by bit
        norm = clipping.clip(self._learning.values(), limit, across=self._group)
        if twin is not None and self._coordinate:  # counted on the first stage
            twin.mul_(clipping.factor(norm, limit))
        return norm


def _together(micro: Sequence[MicroBatch]) -> MicroBatch:
    """All micro-batches of a step one after the other, as the schedule wants to be given them."""
    shapes = {tuple(batch.input_ids.shape) for batch in micro}
    if len(shapes) > 1:
        raise TrainingError(
            f"A pipeline needs micro-batches of one shape; this step has {sorted(shapes)}.",
            hint="Build the token version again, with rows of one length.",
        )
    return MicroBatch(**{name: torch.cat([getattr(batch, name) for batch in micro]) for name in COLUMNS})
