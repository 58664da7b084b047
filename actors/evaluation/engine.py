"""Batch inference with vLLM: one engine, a model and its adapters in it, for as long as a suite runs.

It is the engine that will serve, with the same mends: vLLM loads them itself, by their entry point. That they are
there, nobody has to believe: `parity` shows it. It knows prompts and adapters' folders; it knows nothing about
right answers, scores or the registry.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from actors.data.rows import Message
from actors.evaluation.parity import (
    Dtype,
    Observed,
    ParityCase,
    ParityReference,
    ParityVerdict,
    candidate_reference,
    compare,
    reference,
)
from cluster import environment
from cluster.models import StoredModel, require_signed
from cluster.signing import Verifier, verify
from cluster.storage import Home

# vLLM allocates for one of these ranks.
_RANKS = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Answered:
    """One batch: `texts` in the order of the conversations, and what it took."""

    texts: list[str]
    prompt_tokens: int
    generated_tokens: int
    seconds: float


class BatchEngine:
    """A vLLM engine for whole lists of conversations. Construct it where its device is: it loads at once."""

    def __init__(
        self,
        model: StoredModel,
        adapters: dict[str, Path],
        home: Home,
        *,
        dtype: Dtype = "bfloat16",
        gpu: bool = False,
    ) -> None:
        """`adapters` by name: folders as PEFT saves them. `home`: whose keys are trusted.

        Raises `SignatureError` if nobody who is trusted vouches for the model, or for a registered adapter.
        """
        require_signed(model, home, Verifier())
        for name, path in adapters.items():
            # An adapter is signed when it becomes a version. One that is measured straight from its checkpoint is what
            # a run of ours has just written, and nobody else is offered it before it is registered.
            if path.is_relative_to(home.versions):
                verify(path, home, what=f"adapter {name}", digest=path.name)
        began = monotonic()
        from vllm import LLM  # seconds, and sets up its device
        from vllm.lora.request import LoRARequest

        lora: dict[str, Any] = {}
        if adapters:
            rank = max(_rank(path) for path in adapters.values())
            allowed = next(size for size in _RANKS if size >= rank)
            lora = {"enable_lora": True, "max_lora_rank": allowed, "max_loras": len(adapters)}
        self._llm = LLM(
            model=str(model.path), dtype=dtype, enforce_eager=not gpu, disable_log_stats=True, seed=0, **lora
        )
        self._dtype: Dtype = dtype
        self._start_s = monotonic() - began
        self._folders = dict(adapters)
        self._adapters = {
            name: LoRARequest(name, number, str(path)) for number, (name, path) in enumerate(adapters.items(), 1)
        }

    def start_s(self) -> float:
        """Seconds that the engine took from the import of vLLM until it could answer."""
        return self._start_s

    def answer(
        self, conversations: Sequence[list[Message]], candidates: Sequence[str | None], *, max_new_tokens: int
    ) -> Answered:
        """Greedy answers. `candidates[i]` names the adapter that answers `conversations[i]`; None is the model."""
        from vllm import SamplingParams

        began = monotonic()
        outputs = self._llm.chat(
            list(conversations),
            SamplingParams(temperature=0.0, max_tokens=max_new_tokens),
            lora_request=self._requests(candidates),
            use_tqdm=False,
        )
        return Answered(
            texts=[output.outputs[0].text for output in outputs],
            prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
            generated_tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
            seconds=monotonic() - began,
        )

    def latencies(
        self, conversations: Sequence[list[Message]], candidate: str | None, *, max_new_tokens: int, within_s: float
    ) -> list[float]:
        """Seconds that each conversation takes when it is asked alone, one after the other; at least one of them.

        No new one is begun after `within_s`. The engine is warm, and has forgotten all prompts before the first.
        """
        self.answer(conversations[:1], [candidate], max_new_tokens=max_new_tokens)
        self._llm.reset_prefix_cache()
        began, taken = monotonic(), list[float]()
        for conversation in conversations:
            taken.append(self.answer([conversation], [candidate], max_new_tokens=max_new_tokens).seconds)
            if monotonic() - began >= within_s:
                break
        return taken

    def parity(self, model: StoredModel, home: Home) -> ParityVerdict:
        """Whether this engine's model computes what the trainer computes: all cases in one batch, then each alone."""
        expected = reference(model, home)
        together = compare(expected, self.observe(expected.cases), self._dtype)
        if not together.passed:
            return together
        return compare(expected, [self.observe([case])[0] for case in expected.cases], self._dtype)

    def candidate_parity(
        self,
        model: StoredModel,
        name: str | None,
        conversations: Sequence[list[Message]],
        max_mean_nats: float | None = None,
    ) -> ParityVerdict:
        """Whether the adapter `name` on `model`, or `model` itself, computes here what the trainer's forward does.

        The cases come in one batch in which every other request is the model's, then each alone.
        """
        adapter = None if name is None else self._folders[name]
        expected: ParityReference = candidate_reference(model, adapter, conversations)
        doubled = [case for case in expected.cases for _ in range(2)]
        mixed = self.observe(doubled, [name, None] * len(expected.cases))[::2]
        together = compare(expected, mixed, self._dtype, max_mean_nats)
        if not together.passed:
            return together
        alone = [self.observe([case], [name])[0] for case in expected.cases]
        return compare(expected, alone, self._dtype, max_mean_nats)

    def observe(self, cases: Sequence[ParityCase], candidates: Sequence[str | None] | None = None) -> list[Observed]:
        """What `candidates[i]` (None: the model) says of `cases[i]`, all in one batch."""
        from vllm import SamplingParams

        outputs = self._llm.generate(
            [{"prompt_token_ids": case.prompt} for case in cases],
            [
                SamplingParams(temperature=0.0, max_tokens=max(1, len(case.continuation)), prompt_logprobs=0)
                for case in cases
            ],
            lora_request=self._requests(candidates or [None] * len(cases)),
            use_tqdm=False,
        )
        return [
            Observed(
                # The first place has no value: nothing comes before it.
                [
                    place[token].logprob
                    for token, place in zip(case.prompt[1:], output.prompt_logprobs[1:], strict=True)
                ],
                list(output.outputs[0].token_ids),
            )
            for case, output in zip(cases, outputs, strict=True)
        ]

    def _requests(self, candidates: Sequence[str | None]) -> list[Any] | None:
        # An engine that was started without adapters refuses even a list of None.
        return [self._adapters[name] if name else None for name in candidates] if self._adapters else None


def worker_environment(*, gpu: bool) -> dict[str, str]:
    """What the process that constructs a `BatchEngine` must have in its environment, before vLLM is imported."""
    settings = environment.for_workers()
    if gpu:
        return settings
    return {
        **settings,
        # One process: a batch job gains nothing from an engine core beside it.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The first request for log-probabilities would compile a helper for 12 s; eager it takes microseconds.
        "TORCHDYNAMO_DISABLE": "1",
        # Nothing else computes while a suite runs.
        "OMP_NUM_THREADS": str(os.cpu_count() or 1),
    }


def _rank(adapter: Path) -> int:
    return int(json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["r"])
