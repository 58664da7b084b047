"""Settings of a training run. Read without ray, torch or peft."""

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from cluster.config import Config


class ObjectiveConfig(Config):
    """What is learned."""

    kind: Literal["sft"] = "sft"


class AdapterConfig(Config):
    """Which weights learn: a LoRA adapter (Hu et al. 2021, arXiv:2106.09685) beside a frozen base."""

    kind: Literal["lora"] = "lora"
    r: int = Field(default=16, ge=1, le=256)
    alpha: int = Field(default=32, ge=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"


class WorkersConfig(Config):
    """How many workers a run may have."""

    min: int = Field(default=1, ge=1)
    max: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}")
        return self


class ParallelConfig(Config):
    """How the work is spread."""

    strategy: Literal["ddp", "fsdp"] = "ddp"
    workers: WorkersConfig = WorkersConfig()
    threads_per_worker: int | None = Field(default=None, ge=1)
    """OpenMP threads of each worker on CPU. Unset: the machine's cores divided by the workers on it."""


class OptimizerConfig(Config):
    """AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101) and its schedule."""

    model_config = ConfigDict(allow_inf_nan=False)

    learning_rate: float = Field(default=2e-4, gt=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    global_batch_size: int = Field(default=8, ge=1)
    """Sequences per optimizer step over all workers; the same whatever the number of workers."""
    micro_batch_size: int = Field(default=1, ge=1)
    """Sequences per forward pass of one worker; accumulation makes up the rest."""
    max_grad_norm: float = Field(default=1.0, gt=0)


class CheckpointConfig(Config):
    """When a run writes a checkpoint, and how many it keeps."""

    every_steps: int = Field(default=25, ge=1)
    keep: int = Field(default=3, ge=1)


class TrainConfig(Config):
    """All that the training stage reads."""

    objective: ObjectiveConfig = ObjectiveConfig()
    adapter: AdapterConfig = AdapterConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    precision: Literal["bf16", "fp32"] = "bf16"
    steps: int = Field(default=100, ge=1)
    seed: int = 0
    max_failures: int = Field(default=2, ge=0)
    """Worker-group restarts that Ray Train may do before the run fails."""

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        batch, micro = self.optimizer.global_batch_size, self.optimizer.micro_batch_size
        for workers in range(self.parallel.workers.min, self.parallel.workers.max + 1):
            if batch % (workers * micro):
                raise ValueError(
                    f"global_batch_size {batch} is not divisible by {workers} workers × micro_batch_size {micro}"
                )
        return self
