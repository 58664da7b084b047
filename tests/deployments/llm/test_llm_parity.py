import asyncio
from typing import Any

import pytest

from actors.evaluation.parity import ParityCase, ParityReference
from cluster.errors import ConfigError
from deployments.llm.parity import check

EXPECTED = ParityReference("d", [ParityCase([1, 2, 7], [-0.1, -0.2], [3, 4]), ParityCase([5, 6], [-0.3], [])])


class Machine:
    """An engine that knows the answers, and goes wrong when alone or in company if told so."""

    def __init__(self, *, wrong_alone: bool = False, wrong_together: bool = False) -> None:
        self.wrong_alone, self.wrong_together = wrong_alone, wrong_together
        self.running = self.most = 0

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        self.running += 1
        await asyncio.sleep(0)
        self.most = max(self.most, self.running)
        case = next(case for case in EXPECTED.cases if case.prompt == body["prompt"])
        tokens = case.continuation or [42]
        assert body["max_tokens"] == len(tokens)
        if self.wrong_together if self.running > 1 else self.wrong_alone and self.most > 1:
            tokens = [99, *tokens[1:]]
        seen = [None, *({str(t): {"logprob": p}} for t, p in zip(case.prompt[1:], case.logprobs, strict=True))]
        await asyncio.sleep(0)
        self.running -= 1
        return {"choices": [{"token_ids": tokens, "prompt_logprobs": seen}]}


async def test_an_engine_that_agrees_passes_and_was_asked_in_a_batch_too() -> None:
    machine = Machine()
    verdict = await check(EXPECTED, machine.ask, "float32", 64)
    assert (verdict.passed, verdict.max_nats, machine.most) == (True, 0.0, 2)


async def test_one_that_is_wrong_only_in_a_batch_fails() -> None:
    assert not (await check(EXPECTED, Machine(wrong_together=True).ask, "float32", 64)).passed


async def test_one_that_is_wrong_only_when_alone_fails() -> None:
    assert not (await check(EXPECTED, Machine(wrong_alone=True).ask, "float32", 64)).passed


async def test_cases_that_the_context_cannot_hold_are_left_out() -> None:
    verdict = await check(EXPECTED, Machine().ask, "float32", 3)
    assert (verdict.passed, verdict.continuations) == (True, "0 of 0 the same")
    with pytest.raises(ConfigError, match="max_model_len 2"):
        await check(EXPECTED, Machine().ask, "float32", 2)
