"""Batch inference with vLLM: one engine, the base and its adapters in it, for as long as a suite runs.

It is the engine that will serve, with the same mends: vLLM loads them itself, by their entry point. It knows
prompts and adapters' folders; it knows nothing about references, scores or the registry.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from actors.data.rows import Message
from cluster import environment

# vLLM allocates for one of these ranks.
_RANKS = (8, 16, 32, 64, 128, 256)


class BatchEngine:
    """A vLLM engine for whole lists of conversations. Construct it where its device is: it loads at once."""

    def __init__(
        self,
        model: Path,
        adapters: dict[str, Path],
        *,
        dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
        gpu: bool = False,
    ) -> None:
        """`adapters` by name: folders as PEFT saves them."""
        from vllm import LLM  # seconds, and sets up its device
        from vllm.lora.request import LoRARequest

        lora: dict[str, Any] = {}
        if adapters:
            rank = max(_rank(path) for path in adapters.values())
            allowed = next(size for size in _RANKS if size >= rank)
            lora = {"enable_lora": True, "max_lora_rank": allowed, "max_loras": len(adapters)}
        self._llm = LLM(model=str(model), dtype=dtype, enforce_eager=not gpu, disable_log_stats=True, seed=0, **lora)
        self._adapters = {
            name: LoRARequest(name, number, str(path)) for number, (name, path) in enumerate(adapters.items(), 1)
        }

    def answer(
        self, conversations: Sequence[list[Message]], candidates: Sequence[str | None], *, max_new_tokens: int
    ) -> list[str]:
        """Greedy answers. `candidates[i]` names the adapter that answers `conversations[i]`; None is the base."""
        from vllm import SamplingParams

        outputs = self._llm.chat(
            list(conversations),
            SamplingParams(temperature=0.0, max_tokens=max_new_tokens),
            lora_request=[self._adapters[name] if name else None for name in candidates] if self._adapters else None,
            use_tqdm=False,
        )
        return [output.outputs[0].text for output in outputs]

    def log_probabilities(self, prompts: Sequence[list[int]], *, new_tokens: int) -> list[dict[str, Any]]:
        """For the parity check, by the base: log-probabilities of each prompt's tokens, and a greedy continuation.

        Each result has `prompt` [len - 1] and, of the continuation, `tokens` and `logprobs` [new_tokens].
        """
        from vllm import SamplingParams

        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0.0, max_tokens=new_tokens, logprobs=0, prompt_logprobs=0, ignore_eos=True),
            use_tqdm=False,
        )
        results = []
        for prompt, output in zip(prompts, outputs, strict=True):
            seen = output.prompt_logprobs[1:]
            made = output.outputs[0]
            results.append(
                {
                    "prompt": [place[token].logprob for token, place in zip(prompt[1:], seen, strict=True)],
                    "tokens": list(made.token_ids),
                    "logprobs": [
                        place[token].logprob for token, place in zip(made.token_ids, made.logprobs, strict=True)
                    ],
                }
            )
        return results


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
        # Nothing else computes while a suite runs.
        "OMP_NUM_THREADS": str(os.cpu_count() or 1),
    }


def _rank(adapter: Path) -> int:
    return int(json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["r"])
