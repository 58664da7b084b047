"""How much memory a rank needs at its peak, by the strategy: formulas, without torch.

What stays follows the ZeRO paper (Rajbhandari et al. 2019, arXiv:1910.02054): weights, gradients and AdamW's two
moments, divided by the ranks that share them. What comes and goes is counted, in the manner of Korthikanti et al.
2022 (arXiv:2205.05198), from what torch keeps of a Llama layer for the backward, from the logits, and from the
largest tensors that exist more than once for a moment. `flywheel bench memory` sets the figures beside measured ones.
"""

from dataclasses import dataclass

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
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def peak(self) -> float:
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
    config: TrainConfig, shape: Shape, *, length: int, on_gpu: bool = False, loss_share: float = 1.0
) -> Memory:
    """The peak of one rank with the most workers that the config allows, on rows of `length` tokens.

    `loss_share` is the part of the tokens that has a loss, and so logits; all of them is the safe assumption.
    """
    run = _Run(config, shape, length, on_gpu, loss_share)
    return run.zero() if config.parallel.strategy.startswith("zero") else run.native()


class _Run:
    """The terms, for one config. Letters as in the papers: Ψ parameters, E the embedding's part of them."""

    def __init__(self, config: TrainConfig, shape: Shape, length: int, on_gpu: bool, loss_share: float) -> None:
        self._config = config
        self._shape = shape
        self._layout = Layout.of(config.parallel, config.parallel.workers.max)
        self._on_gpu = on_gpu
        self._low = config.precision == "bf16"
        self._full = config.adapter.kind == "none"
        self._tokens = config.optimizer.micro_batch_size * length / self._layout.context
        self._loss_tokens = self._tokens * loss_share
        self._trained = trained(config, shape)
        self._frozen = 0 if self._full else shape.parameters
        # What is not cut by the model's own axes: embedding and head, and every layer's norms (small enough to leave).
        whole = shape.embedding * (1 if shape.tied else 2)
        self._part = (shape.parameters - whole) / (self._layout.pipeline * self._layout.tensor)
        self._part += whole if self._layout.pipeline == 1 or shape.tied else whole / 2
        self._share = self._part / shape.parameters
        self._embedding = _FP32 * shape.embedding if self._full else 0

    def native(self) -> Memory:
        """DDP, FSDP2 and HSDP, with the model's axes."""
        shards = self._layout.shard * (self._layout.context if self._layout.shard > 1 else 1)
        frozen_width = _BF16 if self._low else _FP32
        weights = (self._trained * _FP32 + self._frozen * frozen_width) * self._share / shards
        gradients = self._trained * _FP32 * self._share / shards
        optimizer = 2 * gradients
        gathered = 0.0
        if shards > 1:  # the root group (embedding and head), and the layer at work with the next one
            width = _BF16 if self._low else _FP32
            gathered = width * (self._shape.embedding + 2 * self._shape.layer)
        # DDP's buckets and an accumulation hold gradients between backwards; otherwise the first makes them.
        in_buckets = shards == 1 and self._layout.replicate * self._layout.context > 1
        held = gradients if in_buckets or self._accumulation > 1 else 0.0
        activations = self.activations()
        # A tied embedding has two gradients and their sum; a sharded one also the copy that is exchanged.
        copies = 4 if shards > 1 else 3
        return max(
            Memory(weights, held, optimizer, activations, self.logits() + gathered + self._embedding),
            Memory(weights, gradients, optimizer, 0, gathered + copies * self._embedding),
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

    @property
    def _accumulation(self) -> int:
        optimizer = self._config.optimizer
        return optimizer.global_batch_size // (optimizer.micro_batch_size * self._layout.data)

    def logits(self) -> float:
        """At the loss positions: the head's output, its log-softmax and the gradient of that, in fp32."""
        copies = 3 * _FP32 + (2 * _BF16 if self._low else 0)
        return self._loss_tokens * self._shape.vocabulary * copies

    def activations(self) -> float:
        """What the backward needs of the forward, of every layer of a stage and of every micro-batch on its way."""
        layers = -(-self._shape.layers // self._layout.pipeline)
        on_their_way = min(self._layout.pipeline, self._accumulation)
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
        return 2 * norm + attention + 4 * inner * width
