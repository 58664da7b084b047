"""Floating-point operations of a training step, by the count of the scaling-law papers (Kaplan et al. 2020,
arXiv:2001.08361): two per parameter and token in the forward, twice that in the backward. Without torch.
"""

from actors.training.config import TrainConfig
from actors.training.memory import trained
from actors.training.shape import Shape


def per_token(config: TrainConfig, shape: Shape, *, length: int) -> float:
    """Operations that one token of a row of `length` costs, forward and backward.

    A frozen matrix takes part in the backward only to hand the gradient on, so it costs 4 instead of 6. With
    activation checkpointing the forward is done twice. Looking up an embedding costs nothing, the head does. Of a
    mixture's experts a token costs those that it goes to.
    """
    learning = trained(config, shape)
    full = config.adapter.kind == "none"
    idle = shape.layer_experts * (1 - shape.experts_per_token / shape.experts) if shape.experts else 0
    matrices = shape.layers * (shape.layer - idle) + shape.embedding
    attention = 2 * shape.layers * shape.heads * shape.head_dim * length  # scores and their sums, causal: half of 4·T
    forward = 2.0 * matrices + attention + (0 if full else 2 * learning)
    backward = 2 * forward if full else 2.0 * matrices + 2 * attention + 4 * learning
    return forward * (2 if config.activation_checkpointing else 1) + backward
