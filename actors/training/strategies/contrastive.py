"""One contrastive step on any number of ranks: the step of one process that holds the whole global batch.

    1. Each rank embeds its texts, micro-batch by micro-batch.
    2. Every rank gets the documents of all, and computes the losses of its own queries against them.
    3. What those losses say of each document is summed over the ranks, and goes back to the rank that embedded it.
    4. Each rank sends the gradients of its vectors back through the model, micro-batch by micro-batch.

With one micro-batch a step the graph of 1 is kept for 4. With more, the texts are embedded without a graph in 1 and
once more, with the same dropout, in 4 (GradCache; Gao et al. 2021, arXiv:2101.06983): memory is that of one
micro-batch whatever the pool, at the price of a second forward.

Knows vectors and their gradients. What is contrasted with what is `objectives.contrastive`'s.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from actors.training import embedder, objectives
from actors.training.batching import MicroBatch
from actors.training.config import ContrastiveConfig, TrainConfig
from actors.training.engine import Place
from actors.training.layout import Layout
from actors.training.objectives import contrastive
from actors.training.objectives.contrastive import Documents, Texts
from actors.training.steps import COLUMNS
from actors.training.strategies.native import NativeEngine
from cluster.errors import ConfigError

_States = tuple[torch.Tensor, torch.Tensor | None]


class ContrastiveEngine(NativeEngine):
    """DDP, FSDP2 and HSDP of an embedder. See `engine.Engine`: its cross-entropy is the contrastive loss here."""

    def __init__(self, config: TrainConfig, base: Path, base_name: str, place: Place, layout: Layout) -> None:
        assert isinstance(config.objective, ContrastiveConfig)
        super().__init__(config, base, base_name, place, layout)
        self._loss = config.objective
        self._rank, self._ranks = layout.data_rank(place.rank), layout.data
        longest = max(self._loss.matryoshka.dims if self._loss.matryoshka else (1,))
        if longest > self._dimension:
            raise ConfigError(
                f"objective.matryoshka.dims names {longest}; vectors of {base_name} have {self._dimension} numbers.",
                hint=f"Use lengths up to {self._dimension}.",
            )

    def _learner(self, config: TrainConfig, base: Path, base_name: str) -> tuple[Any, torch.nn.Module]:
        towers = embedder.trainable(config, base, base_name)
        self._dimension = int(towers.get_embedding_dimension())
        return embedder.learner(towers), objectives.build(config, towers)

    def _backward(self, micro: Sequence[MicroBatch], scale: float) -> torch.Tensor:
        inputs = [tuple(getattr(batch, name) for name in COLUMNS) for batch in micro]
        cached = len(inputs) > 1
        states, embedded = [], []
        with torch.set_grad_enabled(not cached):
            for rows in inputs:
                states.append(_random_states(self._device))
                embedded.append(self._module(*rows))
        whole = [torch.cat(column) for column in zip(*inputs, strict=True)]
        vectors = torch.cat(embedded).detach().requires_grad_()
        loss = self._contrast(vectors, contrastive.unpacked(*whole))
        assert vectors.grad is not None
        gradients = (vectors.grad * scale).split([len(part) for part in embedded])
        for index, (rows, gradient) in enumerate(zip(inputs, gradients, strict=True)):
            with self._exchanging(last=index == len(inputs) - 1):
                if cached:
                    _restore(self._device, states[index])
                    embedded[index] = self._module(*rows)
                embedded[index].backward(gradient)
        return loss

    def _contrast(self, vectors: torch.Tensor, texts: Texts) -> torch.Tensor:
        """The losses of this rank's queries; the gradients of all ranks' losses by `vectors` [N, D] are in its grad."""
        spread = self._ranks > 1 and self._loss.loss == "multiple_negatives"  # a triplet has all it needs in its row
        width = texts.places.max().clone()
        if spread:
            torch.distributed.all_reduce(width, torch.distributed.ReduceOp.MAX)
        queries, own = contrastive.arranged(vectors, texts, width=int(width))
        if not spread:
            loss = contrastive.summed_loss(self._loss, queries, own)
            loss.backward()
            return loss.detach()
        # Not detached from the queries: only the documents of others are somebody else's to learn.
        pool = Documents(
            self._gathered(own.vectors.detach()).requires_grad_(),
            self._gathered(own.numbers),
            self._gathered(own.queries),
        )
        loss = contrastive.summed_loss(self._loss, queries, pool, first=self._rank * len(queries))
        loss.backward()
        theirs = pool.vectors.grad
        assert theirs is not None
        torch.distributed.all_reduce(theirs)
        own.vectors.backward(theirs.unflatten(0, (self._ranks, -1))[self._rank])
        return loss.detach()

    def _gathered(self, own: torch.Tensor) -> torch.Tensor:
        """The parts of all data ranks, one behind the other; all are of one shape."""
        parts = [torch.empty_like(own) for _ in range(self._ranks)]
        torch.distributed.all_gather(parts, own.contiguous())
        return torch.cat(parts)


def _random_states(device: torch.device) -> _States:
    """What the dropout of a forward depends on."""
    there = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return torch.get_rng_state(), there


def _restore(device: torch.device, states: _States) -> None:
    here, there = states
    torch.set_rng_state(here)
    if there is not None:
        torch.get_device_module(device).set_rng_state(there, device)
