"""Settings of a training run. Read without ray, torch or peft."""

import math
import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from cluster.config import Config

_MOST: Final = 2**31 - 1
"""Bound of counts: torch, NumPy and Ray hold them in machine words."""
_YEAR_S: Final = 365 * 86400.0
"""Bound of times: waits of threads and of collectives overflow above some centuries, and JSON knows no infinity."""


class SftConfig(Config):
    """Learn to write the completions of a causal language model."""

    kind: Literal["sft"] = "sft"


class MatryoshkaConfig(Config):
    """The same loss at several lengths of a vector, so that its beginning can stand for it (arXiv:2205.13147)."""

    dims: Annotated[tuple[Annotated[int, Field(ge=1, le=_MOST)], ...], Field(min_length=1)]
    """Numbers that are kept of each vector; the whole vector is learned from only if its length is among them."""
    weights: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] | None = None
    """What the loss at each of `dims` is multiplied with; unset: 1."""

    @model_validator(mode="after")
    def _one_weight_each(self) -> Self:
        if len(set(self.dims)) < len(self.dims):
            raise ValueError(f"dims {list(self.dims)} name a length twice")
        if self.weights is not None and len(self.weights) != len(self.dims):
            raise ValueError(f"{len(self.weights)} weights for {len(self.dims)} dims: give one for each, or none")
        return self


class ContrastiveConfig(Config):
    """Learn that a query is nearer to its positives than to anything else; for bases that make embeddings.

    `multiple_negatives`: the positive against all other documents of the global batch (InfoNCE; Oord et al. 2018,
    arXiv:1807.03748). `triplet`: the positive against each negative of its own row, by a margin.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    kind: Literal["contrastive"]
    loss: Literal["multiple_negatives", "triplet"] = "multiple_negatives"
    temperature: float | None = Field(default=None, gt=0)
    """What cosines are divided by, of multiple_negatives. Unset, with `scale` unset too: 0.05."""
    scale: float | None = Field(default=None, gt=0)
    """1 / temperature, for those who know it by this name."""
    margin: float | None = Field(default=None, gt=0)
    """By how much a negative has to be farther away than the positive, of triplet. Unset: 0.2."""
    distance: Literal["cosine", "euclidean", "manhattan"] | None = None
    """Of triplet. Unset: cosine, which is 1 - the cosine."""
    matryoshka: MatryoshkaConfig | None = None

    @property
    def factor(self) -> float:
        """What cosines are multiplied with."""
        return self.scale if self.scale is not None else 1 / (self.temperature or 0.05)

    @model_validator(mode="after")
    def _speaks_of_its_loss(self) -> Self:
        if self.temperature is not None and self.scale is not None:
            raise ValueError(
                f"temperature {self.temperature} and scale {self.scale} say one thing twice: leave one out"
            )
        others = {"multiple_negatives": ("margin", "distance"), "triplet": ("temperature", "scale")}[self.loss]
        for name in others:
            if getattr(self, name) is not None:
                other = "triplet" if self.loss == "multiple_negatives" else "multiple_negatives"
                raise ValueError(f"{name} {getattr(self, name)} is of loss {other}; loss is {self.loss}")
        return self


def _objective_kind(given: Any) -> str:
    """`{}` and settings without a kind are sft, as they were when there was no other."""
    return str(given.get("kind", "sft") if isinstance(given, dict) else getattr(given, "kind", "sft"))


ObjectiveConfig = Annotated[
    Annotated[SftConfig, Tag("sft")] | Annotated[ContrastiveConfig, Tag("contrastive")],
    Discriminator(
        _objective_kind,
        custom_error_type="objective_kind",
        custom_error_message="there is no objective of that kind; use sft or contrastive",
    ),
]
"""What is learned."""


class AdapterConfig(Config):
    """Which weights learn: a LoRA adapter (Hu et al. 2021, arXiv:2106.09685) beside a frozen base, or all of them."""

    kind: Literal["lora", "none"] = "lora"
    r: int = Field(default=16, ge=1, le=256)
    alpha: int = Field(default=32, ge=1, le=_MOST)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"


class WorkersConfig(Config):
    """How many workers a run may have."""

    # Strict: `true` would be taken for 1.
    min: int = Field(default=1, ge=1, strict=True)
    max: int = Field(default=1, ge=1, strict=True)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}")
        return self


class ParallelConfig(Config):
    """How the work is spread: one mesh of pipeline × replicate × shard × context × tensor ranks.

    The workers that the model's own axes (pipeline, context, tensor) leave over take different rows: replicated
    (ddp), sharded (fsdp, zero1, zero2, zero3), or sharded inside `replicate` groups (hsdp).
    """

    strategy: Literal["ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"] = "ddp"
    workers: WorkersConfig = WorkersConfig()
    tensor: int = Field(default=1, ge=1, strict=True)
    """Ranks that share each matrix (Shoeybi et al. 2019, arXiv:1909.08053)."""
    pipeline: int = Field(default=1, ge=1, strict=True)
    """Ranks that share the layers, one range of them each (Huang et al. 2018, arXiv:1811.06965)."""
    context: int = Field(default=1, ge=1, strict=True)
    """Ranks that share each sequence, no more than attention heads (Jacobs et al. 2023, arXiv:2309.14509)."""
    expert: int = Field(default=1, ge=1, strict=True)
    """Ranks that share the experts of a mixture (Lepikhin et al. 2020, arXiv:2006.16668)."""
    replicate: int = Field(default=1, ge=1, strict=True)
    """Groups of hsdp that each hold the whole model."""
    schedule: Literal["1f1b", "interleaved"] = "1f1b"
    """Order of a pipeline's forward and backward passes; interleaved gives each rank two ranges of layers."""
    offload: Literal["none", "cpu"] = "none"
    """Where ZeRO keeps the optimizer's state."""
    threads_per_worker: int | None = Field(default=None, ge=1, le=1024)
    """OpenMP threads of each worker on CPU. Unset: the machine's cores divided by the workers on it."""

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that work on the same rows."""
        return self.pipeline * self.context * self.tensor

    @model_validator(mode="after")
    def _composes(self) -> Self:
        wide = {axis: size for axis in ("tensor", "pipeline", "context", "expert") if (size := getattr(self, axis)) > 1}
        named = " and ".join(f"{axis} {size}" for axis, size in wide.items())
        if self.strategy.startswith("zero") and wide:
            raise ValueError(f"strategy {self.strategy} shards by data alone, without {named}: use fsdp with {named}")
        if self.offload != "none" and not self.strategy.startswith("zero"):
            raise ValueError(f"offload {self.offload} is ZeRO's: use strategy zero1, zero2 or zero3, or offload none")
        if self.replicate > 1 and self.strategy != "hsdp":
            raise ValueError(f"replicate {self.replicate} is hsdp's; strategy is {self.strategy}")
        if self.schedule != "1f1b" and self.pipeline == 1:
            raise ValueError(f"schedule {self.schedule} needs pipeline of more than 1")
        if self.expert > 1 and self.pipeline > 1:
            raise ValueError("expert with pipeline: the stages do not exchange tokens; use one of the two")
        if self.context > 1 and self.pipeline > 1:
            raise ValueError("context with pipeline: a stage hands on whole sequences; use one of the two")
        if self.expert > 1 and self.tensor > 1:
            raise ValueError("expert with tensor: each expert is whole on its rank; use one of the two")
        unit = self.ranks_per_replica * self.expert * self.replicate
        if self.workers.min != self.workers.max and unit > 1:
            raise ValueError(
                f"workers from {self.workers.min} to {self.workers.max} cannot change one by one with "
                f"{named or f'replicate {self.replicate}'}: set min and max to one number"
            )
        if self.workers.max % unit:
            raise ValueError(
                f"workers {self.workers.max} is no multiple of {unit}, which "
                f"{named or f'replicate {self.replicate}'} needs"
            )
        return self


class OptimizerConfig(Config):
    """AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101) and its schedule."""

    model_config = ConfigDict(allow_inf_nan=False)

    learning_rate: float = Field(default=2e-4, gt=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    global_batch_size: int = Field(default=8, ge=1)
    """Rows per optimizer step over all workers; the same whatever the number of workers.

    Sequences of sft. Pairs of contrastive: the pool that each query is contrasted against is the whole global batch,
    with all its negatives, also where other workers or other micro-batches hold them."""
    micro_batch_size: int = Field(default=1, ge=1)
    """Rows per forward pass of one worker; accumulation makes up the rest. Changes memory and speed, not the loss."""
    max_grad_norm: float = Field(default=1.0, gt=0)


class BestConfig(Config):
    """Checkpoints that are kept for a metric of theirs, however old they are."""

    metric: Annotated[str, Field(min_length=1)] = "loss"
    """One that the run measures at every step, such as loss or grad_norm."""
    mode: Literal["min", "max"] = "min"
    keep: int = Field(default=1, ge=1, le=_MOST)


class CheckpointConfig(Config):
    """When a run writes a checkpoint, where to, and which ones it keeps.

    One that the run went on from, or that an evaluation or a version in the registry was made from, is kept besides.
    """

    every_steps: int = Field(default=25, ge=1, le=_MOST)
    keep: int = Field(default=3, ge=1, le=_MOST)
    """The newest ones."""
    best: BestConfig | None = None
    storage: Annotated[str, Field(min_length=1)] | None = None
    """A folder that all workers see, or s3://bucket/prefix. Unset: the runs of FLYWHEEL_HOME."""

    @field_validator("storage")
    @classmethod
    def _place(cls, storage: str | None) -> str | None:
        """`s3:/bucket` would be a folder of that name, in whichever folder each worker stands."""
        if storage is None or re.match(r"s3://[^/\s]", storage):
            return storage
        if not storage.strip() or re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", storage):
            raise ValueError("neither a folder nor s3://bucket/prefix")
        return storage


class FailuresConfig(Config):
    """How often a run goes on after its workers were lost. Each kind has its own budget, and is counted per start.

    A planned resize costs nothing of either; an error that another try would only repeat is not tried again.
    """

    max: int = Field(default=2, ge=0, le=_MOST)
    """Restarts after a worker died, was stuck, or raised an error that may pass."""
    preemptions: int = Field(default=16, ge=0, le=_MOST)
    """Restarts after a node was taken away by whoever owns it."""


class ElasticConfig(Config):
    """How fast a run sees what happens to it, and how long it waits before it says so. All times in seconds."""

    notice_s: float = Field(default=0.5, gt=0, le=60)
    """Time between two looks at the workers, at the nodes of the cluster, and at what the run is asked to do."""
    regrow_s: float = Field(default=5.0, gt=0, le=_YEAR_S)
    """How long a group must have run before it is resized, when a node came (or went): each resize is a restart."""
    resize_wait_s: float = Field(default=120.0, ge=0, le=_YEAR_S)
    """How long a planned resize or a drained node waits for the checkpoint that makes it cost no steps."""
    start_timeout_s: float = Field(default=30.0, gt=0, le=_YEAR_S)
    """How long a new group waits for its places before the cluster is looked at again."""
    room_timeout_s: float = Field(default=1800.0, gt=0, le=_YEAR_S)
    """How long a run waits for room for `parallel.workers.min` before it ends with a verdict."""
    collective_timeout_s: int = Field(default=600, ge=1, le=int(_YEAR_S))
    """Bound of one collective operation between the workers (gloo, NCCL)."""
    stuck_after_s: float = Field(default=300.0, gt=0, le=_YEAR_S)
    """How long no worker may get anywhere before the one that the others wait for is named and the group restarted.

    Longer than the longest step."""
    begin_within_s: float = Field(default=600.0, gt=0, le=_YEAR_S)
    """The same, at least, until every worker of a new group has done a step: imports, the model, the first data,
    compilation."""


class TrainConfig(Config):
    """All that the training stage reads."""

    objective: ObjectiveConfig = SftConfig()
    adapter: AdapterConfig = AdapterConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    precision: Literal["bf16", "fp32"] = "bf16"
    """What matrices are multiplied in. What learns is kept, summed and updated in fp32 either way."""
    activation_checkpointing: bool = False
    """Keep each layer's input alone and compute the rest again in the backward (Chen et al. 2016, arXiv:1604.06174)."""
    compile: bool = False
    """Compile each layer with torch.compile: slow first steps, faster ones after."""
    steps: int = Field(default=100, ge=1, le=_MOST)
    seed: int = Field(default=0, ge=-(2**63), lt=2**64)
    """As wide as torch's."""
    shuffle: bool = True
    """Each epoch in an order of its own, made of the seed; else every epoch in the order of the data version."""
    failures: FailuresConfig = FailuresConfig()
    elastic: ElasticConfig = ElasticConfig()

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        if self.compile and self.parallel.strategy == "zero3":
            raise ValueError(
                "compile with strategy zero3: zero3 gathers each weight in hooks of Python, which torch.compile "
                "compiles over and over: use fsdp with compile, or compile: false"
            )
        return self

    @model_validator(mode="after")
    def _whole_towers(self) -> Self:
        """Each rank embeds whole texts: what is spread over ranks are rows."""
        if self.objective.kind != "contrastive":
            return self
        for axis in ("tensor", "pipeline", "context", "expert"):
            if (size := getattr(self.parallel, axis)) > 1:
                raise ValueError(
                    f"parallel.{axis} {size} with objective contrastive: set {axis} to 1, use more workers"
                )
        if self.parallel.strategy.startswith("zero"):
            raise ValueError(
                f"strategy {self.parallel.strategy} with objective contrastive: use ddp, or fsdp where memory is short"
            )
        if self.compile:
            raise ValueError(
                "compile with objective contrastive: each length of texts would compile anew; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        batch, micro = self.optimizer.global_batch_size, self.optimizer.micro_batch_size
        replica = self.parallel.ranks_per_replica
        least, most = self.parallel.workers.min, self.parallel.workers.max
        for workers in range(least, most + 1):
            if batch % (workers // replica * micro):
                fits = math.lcm(*(each // replica * micro for each in range(least, min(most, least + 15) + 1)))
                raise ValueError(
                    f"global_batch_size {batch} is not divisible by {workers // replica} data-parallel workers × "
                    f"micro_batch_size {micro}: make it a multiple of {fits}"
                )
        pipeline = self.parallel.pipeline
        count = batch // (self.parallel.workers.max // replica * micro)
        if pipeline > 1 and count < pipeline:
            raise ValueError(
                f"a pipeline of {pipeline} needs at least as many micro-batches a step; "
                "raise global_batch_size or lower micro_batch_size"
            )
        rounds = count // pipeline
        if self.parallel.schedule == "interleaved" and count % rounds:
            # Narayanan et al. 2021 (arXiv:2104.04473): ranks change between their two ranges after each round.
            raise ValueError(
                f"schedule interleaved takes the {count} micro-batches of a step in {rounds} rounds of one size, which "
                f"they do not fill: make global_batch_size a multiple of "
                f"{pipeline * batch // count}, or use schedule 1f1b"
            )
        return self
