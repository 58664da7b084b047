"""Chat templates: an adapter may bring its own, which renders the chats that ask for it; a request may not.

The engine trusts the template of a request, because that is how an adapter's reaches it. So whoever takes requests
from outside has to look (`refuse_in`). Pure, but for reading files.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.errors import RequestError

_FIELD = "chat_template"
_FILE = "chat_template.jinja"
_SETTINGS = "tokenizer_config.json"


def chat_template(folder: Path) -> str | None:
    """The template in a version's folder, wherever `transformers` has put it. `ValueError` if it cannot be read."""
    if (folder / _FILE).is_file():
        return (folder / _FILE).read_text(encoding="utf-8")
    if not (folder / _SETTINGS).is_file():
        return None
    settings = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
    found = settings.get(_FIELD) if isinstance(settings, dict) else None
    if isinstance(found, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise ValueError(f"{_FIELD} of {_SETTINGS} is no text")
    return found


def refuse_in(body: Mapping[str, Any]) -> None:
    """`RequestError` (400) for a chat that brings a template, in either place where vLLM would take one."""
    kwargs = body.get("chat_template_kwargs")
    inside = kwargs.get(_FIELD) if isinstance(kwargs, Mapping) else None
    for place, found in ((_FIELD, body.get(_FIELD)), (f"chat_template_kwargs.{_FIELD}", inside)):
        if found is not None:
            raise RequestError(
                f"{place}: a request cannot bring a chat template.",
                param=place,
                code="invalid_value",
                hint="Register an adapter with its own chat_template.jinja.",
            )
