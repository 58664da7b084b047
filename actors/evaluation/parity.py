"""Does an engine compute what the trainer computes? Engines do disagree silently: fluent, and wrong.

A reference is made once for each set of weights by transformers' own forward in float32; an engine then has to
give nearly the same log-probabilities for the same prompt tokens (its prefill), and to continue greedily with the
same tokens (its decode) where the reference leaves no doubt. Texts alone prove nothing either way: bfloat16 may
turn a near tie, as of the first word about the capital of France (0.1 nats apart in SmolLM2), into another answer.

The same is asked of an engine with a candidate, with held-out prompts in place of the fixed texts: what it learned
shows on its task. The comparison is pure; only the references know torch. This module knows no engine: who
has one asks it.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from actors.data.rows import Message
from cluster.errors import ConfigError
from cluster.models import StoredModel
from cluster.storage import Home, write_atomically

Dtype = Literal["bfloat16", "float16", "float32"]

TEXTS = (
    "What is the capital of France?",
    "Repeat these words and write nothing else: red, green, blue, yellow, orange, violet, black, white.",
    "Write a Python function that adds two numbers.",
    # Longer than one block of the paged cache (128 tokens on CPU).
    "Read this and answer. "
    + "The ship left the harbour at dawn, and the crew watched the lights of the town grow small. " * 9
    + "What did the crew watch?",
)
NEW_TOKENS = 32
"""Tokens of the reference's answer among which the clear ones are looked for."""
SURE_NATS = 1.0
"""A greedy token that leads the next by more than this cannot flip by rounding."""

CANDIDATE_CASES = 4
CANDIDATE_NEW_TOKENS = 16
CANDIDATE_PROMPT_TOKENS = 512

TOLERANCE_NATS: dict[Dtype, float] = {"bfloat16": 0.12, "float16": 0.03, "float32": 0.001}
"""Largest mean |Δ log p| over the prompts' tokens that rounding explains.

Measured with SmolLM2-135M and vLLM 0.32 on CPU: bfloat16 0.036 over 6,700 tokens, with the "vec" kernel and with
"amx" (Hugging Face's own bfloat16: 0.039); float16 0.004; float32 4e-6. A rotary base of a tenth gives 0.24.
With an adapter on held-out prompts of its task: bfloat16 0.063, float32 below 5e-5; the same adapter left out, or
another one in its place, gives 2.6.
"""


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
    """`mean_nats`, `max_nats`: absolute differences of the prompts' log-probabilities over all cases."""

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


def compare(
    reference: ParityReference, observed: Sequence[Observed], dtype: Dtype, max_mean_nats: float | None = None
) -> ParityVerdict:
    """Prompts within `max_mean_nats` (default: what `dtype` explains), and every sure greedy token the same."""
    tolerance = TOLERANCE_NATS[dtype] if max_mean_nats is None else max_mean_nats
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
        passed=bool(mean <= tolerance and same == sure),
        mean_nats=mean,
        max_nats=max(differences),
        tolerance_nats=tolerance,
        continuations=f"{same} of {sure} the same",
    )


def reference(model: StoredModel, home: Home) -> ParityReference:
    """The reference of `model`, made by one float32 forward on this machine or read from an earlier one.

    Making it takes about 10 s and 4 bytes per weight of memory for 135M parameters. `ConfigError` if the model is
    sure of nothing (untrained weights are), for then it cannot be checked.
    """
    path = home.models / f"parity-{model.digest[:16]}.json"
    kept = _kept(path)
    if kept is not None and kept.model_digest == model.digest:
        return kept
    cases = _forward(model.path, TEXTS, NEW_TOKENS)
    if not any(case.continuation for case in cases):
        raise ConfigError(
            f"{model.name} decides no token of the parity cases by {SURE_NATS} nats, so it cannot be checked.",
            hint="Check the weights: untrained ones look like this. To serve them anyway: parity_check: false.",
        )
    made = ParityReference(model.digest, cases)
    write_atomically(path, json.dumps({**asdict(made), "texts": list(TEXTS)}) + "\n")
    return made


def candidate_reference(
    model: StoredModel, adapter: Path | None, conversations: Sequence[list[Message]]
) -> ParityReference:
    """What `model`, with the PEFT folder `adapter` if there is one, says of the first `CANDIDATE_CASES` conversations
    that are short.

    One float32 forward, as the trainer's: transformers' model, with PEFT's layers around it. Made afresh each time, in
    a few seconds for 135M parameters. A candidate that is sure of nothing is compared on its prompts alone. Where no
    conversation is short, the fixed texts stand in.
    """
    cases = _forward(model.path, conversations, CANDIDATE_NEW_TOKENS, adapter, most=CANDIDATE_CASES)
    return ParityReference(model.digest, cases)


def longest_run(flags: Sequence[bool]) -> tuple[int, int]:
    """Start and end of the longest stretch of true values (the first of equals); (0, 0) if there is none."""
    best, start = (0, 0), 0
    for place, flag in enumerate([*flags, False]):
        if not flag:
            best = max(best, (start, place), key=lambda run: run[1] - run[0])
            start = place + 1
    return best if best[1] > best[0] else (0, 0)


def _kept(path: Path) -> ParityReference | None:
    """None if there is none, or one of other texts or of another shape: it is made again."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["texts"] == list(TEXTS):
            return ParityReference(kept["model_digest"], [ParityCase(**case) for case in kept["cases"]])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _forward(
    folder: Path,
    asked: Sequence[str] | Sequence[list[Message]],
    new_tokens: int,
    adapter: Path | None = None,
    *,
    most: int | None = None,
) -> list[ParityCase]:
    """The cases of all that is `asked`; or of the first `most` that are short, and of the fixed texts if none is."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    prompts = [_encode(tokenizer, one) for one in asked]
    if most is not None:
        prompts = [prompt for prompt in prompts if len(prompt) <= CANDIDATE_PROMPT_TOKENS][:most]
        prompts = prompts or [_encode(tokenizer, text) for text in TEXTS]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter))
    model.eval()
    stop = model.generation_config.eos_token_id
    stops = set(stop if isinstance(stop, list) else [stop])
    with torch.inference_mode():
        return [_case(model, prompt, stops, new_tokens) for prompt in prompts]


def _encode(tokenizer: Any, asked: str | list[Message]) -> list[int]:
    """As a chat if the model has a template, so that it is asked what it was trained to answer."""
    turns = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    if tokenizer.chat_template:
        return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))
    return list(tokenizer.encode("\n".join(turn["content"] for turn in turns)))


def _case(model: Any, prompt: list[int], stops: set[int | None], new_tokens: int) -> ParityCase:
    """Answer greedily and keep the longest run of sure tokens; what comes before it joins the prompt."""
    import torch

    past, fed = None, prompt
    of_prompt: list[float] = []
    tokens: list[int] = []
    chosen: list[float] = []
    margins: list[float] = []
    while len(tokens) < new_tokens and not (tokens and tokens[-1] in stops):
        out = model(input_ids=torch.tensor([fed]), past_key_values=past, use_cache=True)
        logprobs = out.logits[0].float().log_softmax(-1)
        if not tokens:
            of_prompt = logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
        (best, second), (token, _) = (part.tolist() for part in logprobs[-1].topk(2))
        tokens.append(token)
        chosen.append(best)
        margins.append(best - second)
        past, fed = out.past_key_values, [token]
    start, end = longest_run([margin >= SURE_NATS for margin in margins])
    logprobs_of_all = [round(value, 6) for value in of_prompt + chosen[:start]]
    return ParityCase([*prompt, *tokens[:start]], logprobs_of_all, tokens[start:end])
