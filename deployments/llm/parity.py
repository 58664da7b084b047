"""Ask a running engine the parity cases, as `actors.evaluation.parity` wants them asked.

What the right answers are and how near is near enough stands there; this module only knows how to ask.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from actors.evaluation.parity import Dtype, Observed, ParityCase, ParityReference, ParityVerdict, compare
from cluster.errors import ConfigError

Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Runs one text completion of the base; takes and gives OpenAI's JSON with vLLM's extensions."""


async def check(expected: ParityReference, ask: Ask, dtype: Dtype, max_model_len: int) -> ParityVerdict:
    """The verdict on all cases in one batch, and if that is good, on each alone.

    Cases longer than the engine's context are left out; `ConfigError` if that leaves none.
    """
    expected = replace(expected, cases=[case for case in expected.cases if _length(case) <= max_model_len])
    if not expected.cases:
        raise ConfigError(
            f"llm.max_model_len {max_model_len} is shorter than every parity case.",
            hint="Give the engine a longer context, or set llm.parity_check: false.",
        )
    together = await asyncio.gather(*(_observe(case, ask) for case in expected.cases))
    verdict = compare(expected, together, dtype)
    if not verdict.passed:
        return verdict
    return compare(expected, [await _observe(case, ask) for case in expected.cases], dtype)


def _length(case: ParityCase) -> int:
    return len(case.prompt) + max(1, len(case.continuation))


async def _observe(case: ParityCase, ask: Ask) -> Observed:
    response = await ask(
        {
            "prompt": case.prompt,
            "max_tokens": max(1, len(case.continuation)),
            "temperature": 0.0,
            "prompt_logprobs": 0,
            "return_token_ids": True,
        }
    )
    choice = response["choices"][0]
    # One entry for each prompt token, the first without a value; JSON has made the token ids strings.
    after_first = zip(case.prompt[1:], choice["prompt_logprobs"][1:], strict=True)
    return Observed([seen[str(token)]["logprob"] for token, seen in after_first], choice["token_ids"])
