"""What is asked and what counts as right. Pure: examples in, cases and verdicts out; no engine, no statistics."""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from actors.data.examples import ChatExample
from actors.data.rows import Message
from cluster.errors import ConfigError

_WRAPPING = "`'\"*"


@dataclass(frozen=True)
class Case:
    """One question: the conversation up to the answer, and the answer that counts as right."""

    id: str
    prompt: list[Message]
    reference: str
    group: str


def cases(examples: Sequence[ChatExample], *, limit: int | None = None) -> list[Case]:
    """Each example as a case: its last message, the assistant's, is the reference.

    With `limit`, the cases whose ids hash lowest: the same ones every time, and a bigger limit only adds to them.
    `ConfigError` names an example that has no question or no answer.
    """
    chosen = sorted(examples, key=lambda one: hashlib.sha256(one.id.encode()).digest())[:limit]
    for one in chosen:
        if len(one.messages) < 2 or one.messages[-1]["role"] != "assistant":
            raise ConfigError(
                f"Example {one.id} does not end with an assistant's answer to a question.",
                hint="Exact match compares with the last message; leave such examples out of the eval data.",
            )
    return [Case(one.id, one.messages[:-1], one.messages[-1]["content"], one.group) for one in chosen]


def most_frequent(asked: Sequence[Case]) -> str:
    """The commonest reference of the cases; of equally common ones the first by alphabet."""
    counts = Counter(normalise(case.reference) for case in asked)
    return min(counts, key=lambda answer: (-counts[answer], answer))


def normalise(answer: str) -> str:
    """An answer as it is compared: Unicode in NFC, white space folded, quotes, Markdown and full stops around it off.

    Case and words count. The rule is the same for every candidate; it forgives form, so that a base model which
    writes `ValueError`. loses nothing against an adapter that writes ValueError.
    """
    folded = " ".join(unicodedata.normalize("NFC", answer).split())
    before = None
    while folded != before:
        before = folded
        folded = folded.strip(_WRAPPING).removesuffix(".").strip()
    return folded


def exact_match(answer: str, reference: str) -> bool:
    """Whether the whole answer is the reference, both normalised (Rajpurkar et al. 2016, arXiv:1606.05250)."""
    return normalise(answer) == normalise(reference)
