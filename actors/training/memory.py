"""How much memory a rank needs at its peak, by the strategy: formulas, without torch.

What stays follows the ZeRO paper (Rajbhandari et al. 2019, arXiv:1910.02054): weights, gradients and AdamW's two
moments, divided by the ranks that share them. What comes and goes is counted, in the manner of Korthikanti et al.
2022 (arXiv:2205.05198), from what torch keeps of a Llama layer for the backward, from the logits, and from the
largest tensors that exist more than once for a moment. `flywheel bench memory` sets the figures beside measured ones.
"""

from dataclasses import dataclass, replace

from actors.training.config import TrainConfig
from actors.training.layout import Layout
from actors.training.shape import Shape

_FP32, _BF16 = 4, 2
_BUCKET = 5_000_000
"""Elements that DeepSpeed reduces at once (strategies/zero.py)."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, the fullest of the mesh.

    `weights`, `gradients` and `optimizer` stay between steps (gradients only where they do); `activations` are those
    that the backward needs; `buffers` is the rest of the peak: logits, gathered layers, gradients on their way, the
    optimizer's intermediate results.

    The host holds two more, also where training is on a GPU: `copied`, into which a checkpoint is copied and written
    from while training goes on; and `read`, the base as every rank reads it from its file, before it is cut.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    copied: float = 0.0
    read: float = 0.0

    @property
    def peak(self) -> float:
        """Of the training itself, on its device."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def trained(config: TrainConfig, shape: Shape) -> int:
    """Parameters that learn: all, or r·(in + out) of every adapted matrix."""
    if config.adapter.kind == "none":
        return shape.parameters
    targets = config.adapter.target_modules
    adapted = [
        (rows, columns)
        for name, rows, columns in shape.matrices
        if targets == "all-linear" or name.rpartition(".")[2] in targets
    ]
    return sum(config.adapter.r * (rows + columns) for rows, columns in adapted)


def estimate(
    config: TrainConfig,
    shape: Shape,
    *,
    length: int,
    workers: int | None = None,
    on_gpu: bool = False,
    loss_share: float = 1.0,
) -> Memory:
    """The peak of one rank of `workers` (the most that the config allows if None), on rows of `length` tokens.

    `loss_share` is the part of the tokens that has a loss, and so logits; all of them is the safe assumption.
    """
    run = _Run(config, shape, length, workers or config.parallel.workers.max, on_gpu, loss_share)
    need = run.zero() if config.parallel.strategy.startswith("zero") else run.native()
    return replace(need, copied=run.copied(), read=run.read())


class _Run:
    """The terms, for one config. Letters as in the papers: Ψ parameters, E the embedding's part of them."""

    def __init__(
        self, config: TrainConfig, shape: Shape, length: int, workers: int, on_gpu: bool, loss_share: float
    ) -> None:
        self._config = config
        self._shape = shape
        self._layout = layout = Layout.of(config.parallel, workers)
        self._on_gpu = on_gpu
        self._low = config.precision == "bf16"
        self._full = config.adapter.kind == "none"
        self._tokens = config.optimizer.micro_batch_size * length / layout.context
        self._loss_tokens = self._tokens * loss_share
        self._trained = trained(config, shape)
        self._frozen = 0 if self._full else shape.parameters
        self._frozen_width = _BF16 if self._low else _FP32
        self._ends = shape.embedding * (1 if shape.tied else 2)
        self._embedding = _FP32 * shape.embedding if self._full else 0
        # Ranks that hold one copy together; of experts that are spread, all that have tokens of their own.
        self._shards = 1 if config.parallel.strategy == "ddp" else layout.shard * layout.context
        self._expert_shards = layout.data * layout.context if layout.expert > 1 else self._shards

    def native(self) -> Memory:
        """DDP, FSDP2 and HSDP, with the model's axes. Of a pipeline the first or the last rank is the fullest."""
        stages = self._layout.pipeline
        if stages == 1:
            return self._native(self._ends, self.activations(), self.logits())
        first, last = (min(most, self._accumulation) for most in self._on_their_way(stages))
        ranks = (
            self._native(self._shape.embedding, self.activations(first), 0.0),
            self._native(self._shape.embedding, self.activations(last), self.logits()),
        )
        return max(ranks, key=lambda memory: memory.peak)

    def _native(self, ends: int, activations: float, logits: float) -> Memory:
        """A rank that has `ends` of the embedding's and head's parameters beside its layers."""
        shape, layout, shards = self._shape, self._layout, self._shards
        dense = (shape.parameters - self._ends - shape.layers * shape.layer_experts) / (layout.pipeline * layout.tensor)
        experts = shape.layers * shape.layer_experts / layout.pipeline
        held = (dense + ends) / shards + experts / self._expert_shards
        learning = held if self._full else self._trained / layout.pipeline / shards
        weights = learning * _FP32 + (0 if self._full else held * self._frozen_width)
        gradients = learning * _FP32
        gathered = 0.0
        if max(shards, self._expert_shards) > 1:
            layer = shape.layer - shape.layer_experts + shape.layer_experts / layout.expert
            # The root group in the width of its weights, and the layer at work with the next one.
            gathered = self._frozen_width * 2 * layer / layout.tensor
            gathered += (_FP32 if self._full else self._frozen_width) * ends * (shards > 1)
            if layout.pipeline > 1:  # a stage stays gathered for the whole step, and so do its gradients
                gathered = (self._frozen_width + (self._frozen_width if self._full else 0)) * (dense + experts + ends)
        # DDP's buckets and an accumulation hold gradients between backwards; otherwise the first makes them.
        in_buckets = shards == 1 and layout.replicate * layout.context > 1
        held_gradients = gradients if in_buckets or self._accumulation > 1 else 0.0
        # A tied embedding has two gradients and their sum; a sharded one also the copy that is exchanged.
        copies = 4 if shards > 1 else 3
        step = gathered + copies * self._embedding
        if self._on_gpu:  # there torch's AdamW works on all tensors at once, with an intermediate result of each
            step = max(step, gradients)
        return max(
            Memory(weights, held_gradients, 2 * gradients, activations, logits + gathered + self._embedding),
            Memory(weights, gradients, 2 * gradients, 0, step),
            key=lambda memory: memory.peak,
        )

    def zero(self) -> Memory:
        """DeepSpeed's stages, as strategies/zero.py sets them up.

        It keeps an fp32 master copy of what learns beside the weights, also where those are fp32, and sums gradients
        in fp32: each rank its part, but stage 1 in bf16 (and stage 1 that accumulates) all of them.
        """
        stage = int(self._config.parallel.strategy[-1])
        shards = self._layout.shard
        width = _BF16 if self._low else _FP32
        weights = float(self._trained + self._frozen) * width
        part = self._trained * _FP32 / shards
        gradients = part
        if stage == 1 and (self._low or self._accumulation > 1):
            gradients = self._trained * (_FP32 + (_BF16 if self._low else 0))
        gathered = 0.0
        if stage == 3:
            weights /= shards
            gathered = width * (self._shape.embedding + 2 * self._shape.layer)
            gradients += _FP32 * _BUCKET
        optimizer = 3 * part  # the master copy and two moments
        if self._config.parallel.offload == "cpu":
            if self._on_gpu:
                gradients, optimizer, part = 0.0, 0.0, 0.0
            else:  # the host is the device: offloading only adds its buffers
                gradients += self._trained * _FP32 + _FP32 * _BUCKET
        # The embedding is larger than a bucket, so its gradient is reduced by itself: at stage 3 with copies in fp32.
        copies = 4 * _FP32 if stage == 3 else width
        head = self.logits() + gathered + (copies * self._shape.embedding if self._full else 0)
        # AdamW works on one flat part, with two intermediate results of its size; stage 3 copies the gradient first.
        step = part * (3 if stage == 3 else 2)
        return max(
            Memory(weights, gradients, optimizer, self.activations(), head),
            Memory(weights, gradients, optimizer, 0, step),
            key=lambda memory: memory.peak,
        )

    def copied(self) -> float:
        """Weights and moments of what learns, in fp32: each rank those that it writes."""
        return 3 * _FP32 * self._trained / self._layout.world_size

    def read(self) -> float:
        """All of the base, in the width that it is trained in."""
        return self._shape.parameters * (_FP32 if self._full else self._frozen_width)

    @property
    def _accumulation(self) -> int:
        optimizer = self._config.optimizer
        return optimizer.global_batch_size // (optimizer.micro_batch_size * self._layout.data)

    def _on_their_way(self, stages: int) -> tuple[float, float]:
        """Micro-batches whose activations the first and the last rank of a pipeline hold at once, in all their layers.

        Interleaved, each pass is through half of them, and more are made first (Narayanan et al. 2021,
        arXiv:2104.04473).
        """
        if self._config.parallel.schedule == "interleaved":
            return (3 * stages - 1) / 2, (stages + 1) / 2
        return stages, 1

    def logits(self) -> float:
        """At the loss positions: the head's output, its log-softmax and the gradient of that, in fp32."""
        copies = 3 * _FP32 + (2 * _BF16 if self._low else 0)
        return self._loss_tokens * self._shape.vocabulary * copies

    def activations(self, on_their_way: float = 1) -> float:
        """What the backward needs of the forward, of every layer of a rank and of every micro-batch on its way."""
        layers = -(-self._shape.layers // self._layout.pipeline)
        per_layer = self._tokens * self._of_layer()
        if not self._config.activation_checkpointing:
            return on_their_way * layers * per_layer
        kept = self._tokens * self._shape.hidden * (_BF16 if self._low and not self._full else _FP32)
        return on_their_way * layers * kept + per_layer

    def _of_layer(self) -> float:
        """Bytes per token that one Llama layer keeps: two norms, attention, and the gated product of the MLP."""
        shape, tensor = self._shape, self._layout.tensor
        width = _BF16 if self._low else _FP32
        attended = width if self._on_gpu else _FP32  # our attention for CPUs works in fp32
        hidden, inner = shape.hidden, shape.intermediate / tensor
        heads, kv = shape.heads * shape.head_dim / tensor, shape.kv_heads * shape.head_dim / tensor
        # A norm computes in fp32 and hands on in the width of its input; one that learns keeps its result too.
        norm = hidden * (_FP32 + width + (_FP32 if self._full else 0) + (_FP32 if self._full and self._low else 0))
        attention = (heads + 2 * kv) * attended + heads * attended + heads * width
        product = 4 * inner * width
        if shape.experts:  # once for each expert that a token goes to, and its copies on the way there and back
            product = shape.experts_per_token * (product + 3 * hidden * width)
        return 2 * norm + attention + product
