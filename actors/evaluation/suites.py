"""What is asked and what counts as right. Pure: examples in, cases and verdicts out; no engine, no statistics."""

from collections.abc import Sequence
from dataclasses import dataclass

from actors.data.examples import ChatExample
from actors.data.rows import Message

_WRAPPING = "`'\"*"


@dataclass(frozen=True)
class Case:
    """One question: the conversation up to the answer, and the answer that counts as right."""

    id: str
    prompt: list[Message]
    reference: str


def cases(examples: Sequence[ChatExample]) -> list[Case]:
    """Each example as a case: its last message, the assistant's, is the reference."""
    return [Case(one.id, one.messages[:-1], one.messages[-1]["content"]) for one in examples]


def normalise(answer: str) -> str:
    """An answer as it is compared: white space folded, quotes and Markdown around it and a last full stop removed.

    Case counts. The rule is the same for every candidate; it forgives form, so that a base model which writes
    `ValueError`. loses nothing against an adapter that writes ValueError.
    """
    folded = " ".join(answer.split())
    before = None
    while folded != before:
        before = folded
        folded = folded.strip(_WRAPPING).removesuffix(".").strip()
    return folded


def exact_match(answer: str, reference: str) -> bool:
    """Whether the whole answer is the reference, both normalised (Rajpurkar et al. 2016, arXiv:1606.05250)."""
    return normalise(answer) == normalise(reference)
