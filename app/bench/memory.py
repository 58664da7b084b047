"""`flywheel bench memory`: the most memory that a rank takes, by strategy, beside what the plan says.

Each case builds the real engine around a model of SmolLM2-135M's shape, or a mixture of as many parameters, in fresh
processes without Ray, and makes a few steps on random rows. Random weights take as much room as trained ones.
"""

import tempfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal

import torch

from actors.training import engine as engines
from actors.training.batching import MicroBatch
from actors.training.config import TrainConfig
from actors.training.engine import Place
from actors.training.layout import Layout
from actors.training.memory import estimate
from actors.training.peak import ENV, measured
from actors.training.shape import read
from app.bench.gang import Gang
from app.bench.report import Bar, Report, Result, report
from cluster.progress import Progress, Sink

TOLERANCE: Final = 0.15
"""How far a prediction may be from what is measured."""
_GIB: Final = 2**30
_SMOLLM2_135M: Final[dict[str, Any]] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
_MIXTURE: Final[dict[str, Any]] = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "vocab_size": 32768,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Case:
    """One measurement: `ranks` workers of `strategy`, all of them on `axis` if there is one."""

    strategy: str
    ranks: int = 2
    axis: Literal["", "tensor", "pipeline", "context", "expert"] = ""
    mixture: bool = False
    adapter: str = "none"
    precision: str = "fp32"
    checkpointing: bool = False
    offload: str = "none"

    @property
    def name(self) -> str:
        trained = "full" if self.adapter == "none" else self.adapter
        extras = [
            name
            for name, on in (
                (self.axis, self.axis),
                ("mixture", self.mixture),
                ("checkpointing", self.checkpointing),
                ("offload", self.offload != "none"),
            )
            if on
        ]
        return "-".join([self.strategy, str(self.ranks), trained, self.precision, *extras])

    def config(self) -> TrainConfig:
        """One row a step and rank that has rows of its own; through a pipeline go as many as it has stages."""
        workers = {"min": self.ranks, "max": self.ranks}
        axes = {self.axis: self.ranks} if self.axis else {}
        rows = 1 if self.axis in ("tensor", "context") else self.ranks
        return TrainConfig.model_validate(
            {
                "adapter": {"kind": self.adapter},
                "precision": self.precision,
                "activation_checkpointing": self.checkpointing,
                "parallel": {"strategy": self.strategy, "workers": workers, "offload": self.offload, **axes},
                "optimizer": {"global_batch_size": rows, "micro_batch_size": 1},
            }
        )


FULL = tuple(Case(strategy) for strategy in ("ddp", "fsdp", "zero1", "zero2", "zero3"))
CASES = (
    *FULL,
    Case("zero2", precision="bf16"),
    Case("zero3", precision="bf16"),
    Case("zero2", offload="cpu"),
    Case("ddp", 1, checkpointing=True),
    *(
        Case(strategy, adapter="lora", precision="bf16", checkpointing=checkpointing)
        for strategy in ("ddp", "fsdp")
        for checkpointing in (False, True)
    ),
    Case("ddp", 3, axis="tensor"),
    Case("ddp", axis="pipeline"),
    Case("ddp", axis="context"),
    Case("fsdp", axis="context"),
    Case("ddp", 1, mixture=True),
    Case("fsdp", mixture=True),
    Case("ddp", axis="expert", mixture=True),
    Case("fsdp", axis="expert", mixture=True),
)


def run(sink: Sink, *, cases: tuple[Case, ...] = CASES, length: int = 512, steps: int = 3, runs: int = 1) -> Report:
    """Measure every case `runs` times; each needs up to 3 GiB a rank."""
    results, bars = [], []
    with tempfile.TemporaryDirectory(prefix="flywheel-bench-") as scratch:
        bases = {mixture: model(Path(scratch) / f"base-{mixture}", mixture=mixture) for mixture in (False, True)}
        for number, case in enumerate(cases):
            base = bases[case.mixture]
            shape = read(base)
            sink(Progress("bench", number, len(cases), "cases", note=case.name))
            taken = Result.of(
                f"{case.name}: peak", "GiB a rank", [peak(case, base, length, steps) for _ in range(runs)]
            )
            said = Result.of(
                f"{case.name}: plan", "GiB a rank", [estimate(case.config(), shape, length=length).peak / _GIB]
            )
            error = Result.of(f"{case.name}: off by", "of the peak", [abs(said.median / taken.median - 1)])
            results += [taken, said, error]
            bars.append(Bar.at_most(error, TOLERANCE))
    return report("memory", runs, results, bars)


def peak(case: Case, base: Path, length: int, steps: int) -> float:
    """GiB that the fullest rank of `case` took, in processes of their own."""
    gang = Gang(ENV)
    try:
        taken: list[int] = gang.run(case.ranks, work, case.config(), base, length, steps, timeout_s=600)
        return max(taken) / _GIB
    finally:
        gang.close()


def work(place: Place, config: TrainConfig, base: Path, length: int, steps: int) -> int:
    """What one rank does; bytes at its peak, beyond its libraries."""
    _warm(config)
    layout = Layout.of(config.parallel, place.world_size)
    draw = torch.Generator().manual_seed(layout.data_rank(place.rank))
    count = config.optimizer.global_batch_size // layout.data
    with measured(place.device) as taken:
        engine = engines.build(config, base, "shape", place, layout)
        for _ in range(steps):
            micro = []
            for _ in range(count):
                ids = torch.randint(_MIXTURE["vocab_size"], (1, length), generator=draw)
                micro.append(MicroBatch(input_ids=ids, labels=ids, position_ids=torch.arange(length)[None]))
            tokens = (length - 1.0) * count * layout.data
            engine.step([batch.to(place.device) for batch in micro], loss_tokens=tokens, learning_rate=1e-5)
        engine.close()
    return taken.bytes


def model(folder: Path, *, mixture: bool = False) -> Path:
    """A model folder of SmolLM2-135M's shape in bf16, or a mixture of experts of 130 million parameters."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    config = Qwen3MoeConfig(**_MIXTURE) if mixture else LlamaConfig(**_SMOLLM2_135M)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def _warm(config: TrainConfig) -> None:
    """Import and start what is loaded at first use, so that it is not counted."""
    if config.parallel.strategy.startswith("zero"):
        import_module("actors.training.strategies.zero")  # which readies DeepSpeed before it is imported
    families = ("llama.modeling_llama", "qwen3_moe.modeling_qwen3_moe")
    for name in ("peft", *(f"transformers.models.{family}" for family in families)):
        import_module(name)
    torch.ones(64, 64) @ torch.ones(64, 64)
