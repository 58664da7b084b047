"""A conversation as tokens, and which of them the model learns to say.

Owns the use of a tokenizer's chat template. Pure given a tokenizer; does not know packing, files or Ray.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from actors.data.rows import Message
from cluster.errors import ConfigError

LEARNED_MARKS = ("⟦", "⟧")
"""Around the text that has loss, in `show_mask`."""
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: Any
    all_special_ids: list[int]

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def decode(self, token_ids: Any, **options: Any) -> Any: ...


@dataclass(frozen=True)
class RenderedChat:
    """Token ids of a whole conversation and, for each, whether it has loss."""

    input_ids: list[int]
    loss_mask: list[bool]


class RenderError(ValueError):
    """A conversation that this template cannot render with a right mask. `reason` is for the manifest."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def load_tokenizer(path: Path) -> Any:
    """The tokenizer in `path`; `ConfigError` if there is none or it has no chat template."""
    from transformers import AutoTokenizer  # heavy: seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"There is no usable tokenizer in {path}: {str(error).splitlines()[0]}",
            hint="Give the folder of a model with tokenizer.json.",
        ) from None
    if not tokenizer.chat_template:
        raise ConfigError(
            f"The tokenizer in {path} has no chat template, so conversations cannot be rendered.",
            hint="Use an instruction-tuned model as base, or put a chat_template.jinja beside its tokenizer.",
        )
    return tokenizer


def render(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> RenderedChat:
    """Tokens of `messages`, with loss on each assistant turn: its content and the token that ends it.

    What a server sends before an answer is the template's text up to there with the generation prompt, so the
    answer is what the whole conversation has beyond it; this is compared token by token, for every turn, and
    holds for any template that writes a turn without looking at later ones. Templates that do look (some drop
    the reasoning of earlier turns) may mark answers with `{% generation %}`; then their marks are used.
    Raises `RenderError` where neither is possible.
    """
    whole = _tokens(tokenizer, messages)
    if not any(message["role"] == "assistant" for message in messages):
        raise RenderError("no-answer", "no assistant turn")
    try:
        spans = list(_answers_by_prefix(tokenizer, messages, whole))
    except RenderError:
        if not _GENERATION_BLOCK.search(str(tokenizer.chat_template)):
            raise
        spans = _answers_by_marks(tokenizer, messages)
    special = frozenset(tokenizer.all_special_ids)
    mask = [False] * len(whole)
    for start, end in spans:
        # After the end-of-turn token templates write a line break, which no server waits for.
        last = max((place for place in range(start, end) if whole[place] in special), default=end - 1)
        mask[start : last + 1] = [True] * (last + 1 - start)
    return RenderedChat(whole, mask)


def show_mask(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> str:
    """The rendered conversation as a person reads it, with ⟦…⟧ around what has loss."""
    rendered = render(tokenizer, messages)
    opened, closed = LEARNED_MARKS
    pieces = []
    for learned, run in groupby(zip(rendered.input_ids, rendered.loss_mask, strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        pieces.append(f"{opened}{text}{closed}" if learned else text)
    return "".join(pieces)


def _answers_by_prefix(
    tokenizer: ChatTokenizer, messages: Sequence[Message], whole: list[int]
) -> Iterator[tuple[int, int]]:
    """[start, end) of each assistant turn in `whole`."""
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = _tokens(tokenizer, messages[:turn], add_generation_prompt=True)
        answered = whole if turn == len(messages) - 1 else _tokens(tokenizer, messages[: turn + 1])
        if answered[: len(asked)] != asked or whole[: len(answered)] != answered:
            raise RenderError(
                "template-not-prefix-stable",
                f"turn {turn}: what the model is asked with is not the beginning of what it would learn from",
            )
        if len(answered) == len(asked):
            raise RenderError("empty-answer", f"turn {turn}: the template writes nothing for this answer")
        yield len(asked), len(answered)


def _answers_by_marks(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> list[tuple[int, int]]:
    try:
        marked = tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
    except Exception as error:  # noqa: BLE001 - as in _tokens
        raise RenderError("template-error", _first_line(error)) from None
    mask, whole = marked["assistant_masks"], marked["input_ids"]
    special = frozenset(tokenizer.all_special_ids)
    spans = []
    for learned, run in groupby(range(len(mask)), key=lambda place: bool(mask[place])):
        places = list(run)
        if learned:
            end = places[-1] + 1
            # Many templates close the block before the end-of-turn token; without it a model never stops.
            closes = end < len(whole) and whole[end - 1] not in special and whole[end] in special
            spans.append((places[0], end + closes))
    if not spans:
        raise RenderError("empty-answer", "the template marks no token as an answer")
    return spans


def _tokens(tokenizer: ChatTokenizer, messages: Sequence[Message], **options: Any) -> list[int]:
    try:
        tokens = tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=False, **options)
    except Exception as error:  # noqa: BLE001 - a template is a program: its raise_exception and its bugs are the row's
        raise RenderError("template-error", _first_line(error)) from None
    return [int(token) for token in tokens]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
