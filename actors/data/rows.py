"""One example before it is tokenized, whatever it was read from, and its identity.

Pure values. Does not know where rows come from, how they are split or how they are stored.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

from actors.data.config import Split

Shape = Literal["chat", "pairs"]


class Message(TypedDict):
    """One turn of a conversation; `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a row stands in its source. `package` and `version` are empty for a user's own file."""

    file: str
    line: int
    package: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A conversation (`messages`) or a retrieval pair (`query`, `positive`, and `negatives` if the source has some).

    `group` must not stand on both sides of a split. `split` is set only where the source has
    sides of its own.
    """

    id: str
    group: str
    origin: Origin
    messages: tuple[Message, ...] = ()
    query: str = ""
    positive: str = ""
    negatives: tuple[str, ...] = ()
    split: Split | None = None

    @property
    def compared_text(self) -> str:
        """What counts for near duplicates: what is asked, because that is what must not be known before.

        System messages are left out: a set that shares one would look alike all through.
        """
        if self.messages:
            return asked(self.messages)
        return f"{self.query}\n{self.positive}"


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row (or file) that cannot be used, for the quarantine file. `row` is its text, cut short."""

    reason: str
    detail: str
    file: str
    line: int
    row: str = ""


def asked(messages: tuple[Message, ...]) -> str:
    """The conversation without system messages and without its last answer."""
    return "\n".join(message["content"] for message in messages[:-1] if message["role"] != "system")


def turns(stored: Iterable[Mapping[str, str]]) -> list[Message]:
    """Messages as they come back from Parquet."""
    return [Message(role=turn["role"], content=turn["content"]) for turn in stored]


def content_id(content: object) -> str:
    """16 hex digits of SHA-256 over the content: equal contents have equal ids, wherever they stand."""
    text = json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rank(seed: int, identity: str) -> str:
    """Sort key that puts rows or groups into an order that looks random and is always the same."""
    return hashlib.sha256(f"{seed}:{identity}".encode()).hexdigest()
