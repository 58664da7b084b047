"""What of the settings can be known to fail from the model's folder alone, before anything that serves is touched."""

import json
from pathlib import Path

from cluster.errors import ConfigError
from deployments.llm.config import LLMConfig


def check(config: LLMConfig, folder: Path) -> None:
    """`ConfigError` if the model in `folder` cannot be served as `config` says."""
    described = folder / "config.json"
    if not described.is_file():
        raise ConfigError(
            f"llm.model {config.model!r} is no language model: {folder} has no config.json.",
            hint="Give a folder as save_pretrained() writes it.",
        )
    facts = json.loads(described.read_text(encoding="utf-8"))
    longest = facts.get("max_position_embeddings")
    if isinstance(longest, int) and config.max_model_len > longest and not facts.get("rope_scaling"):
        raise ConfigError(
            f"llm.max_model_len {config.max_model_len} is more than the {longest} tokens that {config.model} was made "
            "for.",
            hint=f"Set llm.max_model_len to {longest} or less.",
        )
