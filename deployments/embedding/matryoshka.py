"""Shorter vectors of a model that was trained to have them (Matryoshka, Kusupati et al. 2022, arXiv:2205.13147).

A vector's beginning is a vector of its own only if training made it one, so what may be asked for is a set: what the
model says of itself, or the settings. Pure but for reading the model's own files.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cluster.errors import ConfigError, RequestError
from cluster.vectors.port import Vectors

_SAID_IN = ("config_sentence_transformers.json", "config.json")
_KEYS = ("matryoshka_dimensions", "matryoshka_dims")
"""vLLM's word in `config.json`, and that of sentence-transformers' loss, which stands in model cards."""
_CARD = re.compile(r'"matryoshka_dims":\s*\[([\d\s,]+)\]')
_LONGEST_CARD_BYTES = 1 << 20


def said_by(folder: Path) -> tuple[int, ...]:
    """The dimensions that the model in `folder` says it was trained for; none if it says nothing."""
    for name in _SAID_IN:
        try:
            facts = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        for key in _KEYS:
            said = facts.get(key) if isinstance(facts, dict) else None
            if isinstance(said, list) and said and all(type(one) is int for one in said):
                return tuple(said)
    try:
        with (folder / "README.md").open(encoding="utf-8", errors="replace") as card:
            found = _CARD.search(card.read(_LONGEST_CARD_BYTES))
    except OSError:
        return ()
    return tuple(int(one) for one in found[1].replace(",", " ").split()) if found else ()


def offered(own: int, said: Sequence[int], wanted: Sequence[int] | None) -> tuple[int, ...]:
    """What `dimensions` may be asked for, longest first: the model's `own` always, else `wanted`, else what it `said`.

    `ConfigError` if the settings want more than the vectors have.
    """
    if wanted is not None and (beyond := [one for one in wanted if one > own]):
        raise ConfigError(
            f"serve.embedding.dimensions names {beyond[0]}, but the model's vectors have {own}.",
            hint=f"Name numbers up to {own}.",
        )
    shorter = said if wanted is None else wanted
    return tuple(sorted({own, *(one for one in shorter if 0 < one < own)}, reverse=True))


def require(asked: int | None, known: Sequence[int], model: str) -> None:
    """`RequestError` 400 for a number of dimensions that is not offered."""
    if asked is None or asked in known:
        return
    raise RequestError(
        f"{model} has no vectors of {asked} dimensions; it has {', '.join(map(str, known))}.",
        param="dimensions",
        code="invalid_value",
        hint="Leave `dimensions` out, or ask for one of these."
        if len(known) > 1
        else "Leave `dimensions` out. If the model was trained for shorter ones, name them in "
        "serve.embedding.dimensions.",
    )


def cut(vectors: Vectors, asked: int | None) -> Vectors:
    """The first `asked` of each row of `vectors` [N, D], made of length one; unchanged if that is all, or None."""
    if asked is None or asked == vectors.shape[1]:
        return vectors
    head = vectors[:, :asked]
    # A head of zeros has no direction; torch.nn.functional.normalize leaves it as it is, too.
    lengths = np.maximum(np.linalg.norm(head, axis=1, keepdims=True), 1e-12)
    return np.ascontiguousarray(head / lengths, dtype=np.float32)
