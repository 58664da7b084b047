"""The card: what a version says of itself, a file in its folder under the same digest and signature as the weights.

What can be read from the model's files is read from them; the rest is what the registering process says. The same
content with the same card is the same version, so a card is always the same bytes. This module reads files; it
writes none, and it does not know numbers, aliases or the version store.
"""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import ConfigDict, Field, ValidationError

from actors.registry.artifacts import Inspection, inspect, read_text
from actors.registry.facts import AdapterShape
from actors.registry.snapshot import Kind
from cluster import models
from cluster.config import Config
from cluster.errors import ConfigError

CARD_FILE: Final = "flywheel.json"
_LARGEST: Final = 16 << 20
_FRONT_MATTER: Final = re.compile(r"\A---\r?\n(.*?)\r?\n---\s*(?:\r?\n|\Z)", re.DOTALL)
_NO_TOKENIZER: Final = hashlib.sha256().hexdigest()
_DTYPES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "U8": "uint8",
}
"""As torch calls them; others keep the name that safetensors gives them."""


class Card(Config):
    """What a version is, and what it was made from.

    `dtype` is the one in which most bytes of the weights are kept. `adapter` is None for what is no adapter. Digests
    are SHA-256 in hex, "" where nobody said.
    """

    # Kept as they are, so that `encode` can refuse what JSON does not have.
    model_config = ConfigDict(ser_json_inf_nan="constants")
    format: Literal[1] = 1
    kind: Kind
    base: str
    base_digest: str = ""
    tokenizer_digest: str = ""
    chat_template_digest: str = ""
    adapter: AdapterShape | None = None
    dtype: str
    licence: str | None = None
    recipe: dict[str, Any] = Field(default_factory=dict)
    recipe_digest: str = ""
    lock_digest: str = ""
    code_commit: str = ""
    run_id: str | None = None
    checkpoint_id: str | None = None
    data_version: str | None = None


def describe(
    source: Path,
    *,
    kind: Kind,
    base: str,
    base_digest: str = "",
    tokenizer_digest: str = "",
    licence: str | None = None,
    recipe: dict[str, Any] | None = None,
    recipe_digest: str = "",
    lock_digest: str = "",
    code_commit: str = "",
    run_id: str | None = None,
    checkpoint_id: str | None = None,
    data_version: str | None = None,
) -> Card:
    """The card of the folder `source`; `ConfigError` if the folder may not be a version of that kind.

    The folder's own tokenizer outweighs `tokenizer_digest`, except for an adapter, which is served with its base's.
    A `licence` that the caller names outweighs the folder's.
    """
    inspection = inspect(source, kind)
    own = _own_tokenizer(source)
    return Card(
        kind=kind,
        base=base,
        base_digest=base_digest,
        tokenizer_digest=(tokenizer_digest or own) if kind == "adapter" else (own or tokenizer_digest),
        chat_template_digest=_chat_template_digest(source),
        adapter=inspection.adapter,
        dtype=dtype_of(inspection),
        licence=licence or _licence(source),
        recipe=recipe or {},
        recipe_digest=recipe_digest,
        lock_digest=lock_digest,
        code_commit=code_commit,
        run_id=run_id,
        checkpoint_id=checkpoint_id,
        data_version=data_version,
    )


def encode(card: Card) -> bytes:
    """The bytes of `flywheel.json`: sorted keys, no spaces, UTF-8. Equal cards are equal bytes."""
    try:
        text = json.dumps(
            card.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
        return text.encode()
    except ValueError as error:
        raise ConfigError(
            f"The recipe cannot be written into {CARD_FILE}: {error}.", hint="Leave NaN and infinities out of it."
        ) from None


def decode(text: str) -> Card:
    """The card that `encode` wrote; `ConfigError` for anything else, also for one that a newer Flywheel wrote."""
    try:
        return Card.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(
            f"{CARD_FILE} is not a card that this Flywheel can read: {where}: {first['msg']}.",
            hint="Use the Flywheel that wrote it, or a newer one.",
        ) from None


def read(folder: Path) -> Card:
    """The card in a version's folder; `ConfigError` if there is none, or one that cannot be read."""
    return decode(read_text(folder / CARD_FILE, limit=_LARGEST))


def dtype_of(inspection: Inspection) -> str:
    """The dtype in which most bytes of the weights are kept, as torch calls it."""
    sizes: Counter[str] = Counter()
    for tensors in inspection.tensors.values():
        for tensor in tensors.values():
            sizes[tensor.dtype] += tensor.nbytes
    # By name where two are equal, so that the answer does not depend on the order of the files.
    largest = min(sizes, key=lambda dtype: (-sizes[dtype], dtype))
    return _DTYPES.get(largest, largest)


def _own_tokenizer(source: Path) -> str:
    found = models.tokenizer_digest(source)
    return "" if found == _NO_TOKENIZER else found


def _chat_template_digest(source: Path) -> str:
    """Over the template's text, wherever it stands: a newer `transformers` only moves it to a file of its own."""
    if (source / "chat_template.jinja").is_file():
        return _digest(read_text(source / "chat_template.jinja"))
    template = _json(source / "tokenizer_config.json").get("chat_template")
    if not template:
        return ""
    return _digest(template if isinstance(template, str) else json.dumps(template, sort_keys=True))


def _licence(source: Path) -> str | None:
    found = _json(source / "config.json").get("license")
    if not found and (source / "README.md").is_file():
        match = _FRONT_MATTER.match(read_text(source / "README.md"))
        try:
            content = yaml.safe_load(match[1]) if match else None
        except (yaml.YAMLError, ValueError, RecursionError):
            # A model may be used whatever its README looks like; it is only not known to be free then.
            content = None
        found = content.get("license") if isinstance(content, dict) else None
    if isinstance(found, list):
        found = ", ".join(map(str, found))
    return found.strip()[:200] or None if isinstance(found, str) else None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    # `inspect` has let it in: it is JSON.
    content = json.loads(read_text(path))
    return content if isinstance(content, dict) else {}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
