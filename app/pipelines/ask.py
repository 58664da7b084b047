"""Ask served models with the official OpenAI client, as an application would: whole answers and streamed ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai

from actors.data.examples import ChatExample
from cluster.progress import Progress, Sink


@dataclass(frozen=True)
class Answer:
    """One question to one model. `version` is what the gateway says has answered."""

    model: str
    version: str
    question: str
    expected: str
    answer: str
    streamed: str

    @property
    def same(self) -> bool:
        """Whether streaming gave the same text; at temperature 0 it must."""
        return self.answer == self.streamed


def ask(
    url: str,
    names: Sequence[str],
    questions: Sequence[ChatExample],
    sink: Sink,
    *,
    max_tokens: int,
    key: str | None = None,
) -> list[Answer]:
    """Each question to each model, streaming and not, at temperature 0."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key or "none", max_retries=0, timeout=120)
    answers = []
    for question in questions:
        *prompt, reference = question.messages
        for name in names:
            request: dict[str, Any] = {"model": name, "messages": prompt, "max_tokens": max_tokens, "temperature": 0.0}
            whole = client.chat.completions.create(**request)
            pieces = [
                event.choices[0].delta.content or ""
                for event in client.chat.completions.create(**request, stream=True)
                if event.choices
            ]
            answers.append(
                Answer(
                    model=name,
                    version=whole.system_fingerprint or "",
                    question=prompt[-1]["content"],
                    expected=reference["content"],
                    answer=whole.choices[0].message.content or "",
                    streamed="".join(pieces),
                )
            )
            sink(Progress("ask", len(answers), len(questions) * len(names), "questions"))
    return answers
