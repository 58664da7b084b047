"""How long an input may be: what the model reads, or less."""

from pathlib import Path

from cluster.errors import ConfigError


def longest_input(path: Path, wanted: int | None, own: int | None, *, section: str) -> int:
    """Tokens of the longest input: `own` of the model in `path`, or `wanted`. `section` is where that is set.

    Raises `ConfigError` for more than the model reads, and if neither is known.
    """
    if own is None:
        if wanted is None:
            raise ConfigError(f"{path} names no longest input.", hint=f"Set {section}.max_tokens.")
        return wanted
    if wanted is not None and wanted > own:
        raise ConfigError(
            f"max_tokens is {wanted}, but {path.name} reads {own} tokens at the most.",
            hint=f"Set {section}.max_tokens to {own} or less, or leave it out.",
        )
    return min(wanted or own, own)
