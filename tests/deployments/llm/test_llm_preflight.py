"""What is refused before anything that serves is touched."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ConfigError
from deployments.llm.config import LLMConfig
from deployments.llm.preflight import check


def model(folder: Path, **facts: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


def test_a_context_that_the_model_was_not_made_for_is_refused(tmp_path: Path) -> None:
    folder = model(tmp_path, max_position_embeddings=2048)
    check(LLMConfig(model="m", max_model_len=2048), folder)
    with pytest.raises(ConfigError, match=r"max_model_len 4096 is more than the 2048 tokens that m"):
        check(LLMConfig(model="m", max_model_len=4096), folder)


def test_a_stretched_context_and_a_silent_model_are_the_engines_to_judge(tmp_path: Path) -> None:
    stretched = {"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 4}}
    check(LLMConfig(model="m", max_model_len=8192), model(tmp_path, **stretched))
    check(LLMConfig(model="m", max_model_len=8192), model(tmp_path))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no language model"):
        check(LLMConfig(model="m"), tmp_path)
