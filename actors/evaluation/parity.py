# NOTE (main developer) to helper MODELS+EVALUATION: I overwrote your parity.py by accident at 00:27 while you were silent.
# Put your own version back (Question, Answer, ParityReference, compare as deployments/llm/parity.py uses them) and delete this note.
# I have also written suites.py, statistics.py, report.py, gates.py, engine.py, evaluate.py in this folder: take them over, improve where
# you know better (app/pipelines use report.EvaluationReport, evaluate.evaluate, Score/Interval), do not write them again; then tests.
"""Does an engine compute what the trainer computes? Engines do disagree silently: fluent, and wrong.

A reference is made once for each set of weights by transformers' own forward in float32; an engine then has to
give the same log-probabilities for the same tokens (prefill), and to continue greedily with the same tokens where
the reference leaves no doubt (decode). The comparison is pure; only `reference` knows torch.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from cluster.models import StoredModel
from cluster.storage import Home, write_atomically

Dtype = Literal["bfloat16", "float16", "float32"]

PROMPTS = (
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    "one two three four five six seven eight nine ten eleven twelve one two three four five six",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n    return a - b\n\ndef multiply(a, b):\n    return",
    "It was a bright cold day in April, and a small dog ran over the wet street to its house. It was a bright cold",
)
NEW_TOKENS = 8
SURE_NATS = 1.0
"""A greedy token that leads the next by more than this cannot flip by rounding."""

TOLERANCE_NATS: dict[Dtype, float] = {"bfloat16": 0.12, "float16": 0.03, "float32": 0.005}
"""Mean absolute difference of log-probabilities that rounding explains; measured figures in docs/decisions/0005."""


@dataclass(frozen=True)
class ParityCase:
    """`prompt` [T] and what follows it. `logprobs` [T - 1] of its tokens after the first; the sure continuation."""

    prompt: list[int]
    logprobs: list[float]
    continuation: list[int]


@dataclass(frozen=True)
class ParityReference:
    """What the weights of one digest compute."""

    model_digest: str
    cases: list[ParityCase]


@dataclass(frozen=True)
class Observed:
    """What an engine says of one case: log-probabilities of the prompt [T - 1], and its greedy continuation."""

    logprobs: Sequence[float]
    continuation: Sequence[int]


@dataclass(frozen=True)
class ParityVerdict:
    """`mean_nats`, `max_nats`: absolute differences of log-probabilities over all cases."""

    passed: bool
    mean_nats: float
    max_nats: float
    tolerance_nats: float
    continuations: str

    def __str__(self) -> str:
        return (
            f"log-probabilities differ by {self.mean_nats:.4f} nats in the mean (at most {self.max_nats:.3f}; "
            f"{self.tolerance_nats} allowed), sure tokens: {self.continuations}"
        )


def compare(reference: ParityReference, observed: Sequence[Observed], dtype: Dtype) -> ParityVerdict:
    """Prefill within the tolerance of `dtype`, and every sure greedy token the same."""
    differences = [
        abs(theirs - ours)
        for case, seen in zip(reference.cases, observed, strict=True)
        for ours, theirs in zip(case.logprobs, seen.logprobs, strict=True)
    ]
    same, sure = 0, 0
    for case, seen in zip(reference.cases, observed, strict=True):
        sure += len(case.continuation)
        same += sum(a == b for a, b in zip(case.continuation, seen.continuation, strict=False))
    mean = sum(differences) / len(differences)
    return ParityVerdict(
        # NaN compares as false, so an engine that returns it fails.
        passed=bool(mean <= TOLERANCE_NATS[dtype] and same == sure),
        mean_nats=mean,
        max_nats=max(differences),
        tolerance_nats=TOLERANCE_NATS[dtype],
        continuations=f"{same} of {sure} the same",
    )


def reference(model: StoredModel, home: Home) -> ParityReference:
    """The reference of `model`, made by one float32 forward on this machine or read from an earlier one."""
    path = _path(model, home)
    if path.is_file():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept.get("prompts") == list(PROMPTS):
            return ParityReference(kept["model_digest"], [ParityCase(**case) for case in kept["cases"]])
    made = ParityReference(model.digest, _forward(model.path))
    write_atomically(path, json.dumps({**asdict(made), "prompts": list(PROMPTS)}))
    return made


def _path(model: StoredModel, home: Home) -> Path:
    return home.root / "cache" / "parity" / f"{model.digest}.json"


def _forward(folder: Path) -> list[ParityCase]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    cases = []
    with torch.inference_mode():
        for text in PROMPTS:
            prompt: list[int] = tokenizer(text)["input_ids"]
            logprobs = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), dim=-1)
            of_prompt = logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
            continuation: list[int] = []
            while len(continuation) < NEW_TOKENS:
                after = torch.log_softmax(model(torch.tensor([prompt + continuation])).logits[0, -1].float(), dim=-1)
                best, second = after.topk(2).values.tolist()
                if best - second < SURE_NATS:
                    break
                continuation.append(int(after.argmax()))
            cases.append(ParityCase(prompt, of_prompt, continuation))
    return cases
