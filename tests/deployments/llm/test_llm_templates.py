import json
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import RequestError
from deployments.llm.templates import chat_template, refuse_in


def settings(folder: Path, template: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def test_a_template_is_found_wherever_transformers_puts_it(tmp_path: Path) -> None:
    assert chat_template(tmp_path) is None
    assert chat_template(settings(tmp_path, "{{ messages }}")) == "{{ messages }}"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert chat_template(settings(tmp_path, named)) == "d"
    (tmp_path / "chat_template.jinja").write_text("its own file")
    assert chat_template(tmp_path) == "its own file"


def test_a_tokenizer_without_a_template_has_none(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert chat_template(tmp_path) is None


@pytest.mark.parametrize("content", ["{", json.dumps({"chat_template": 3})])
def test_one_that_cannot_be_read_is_a_fault(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"."):
        chat_template(tmp_path)


@pytest.mark.parametrize("body", [{"chat_template": "x"}, {"chat_template_kwargs": {"chat_template": ""}}])
def test_a_request_may_not_bring_one(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="cannot bring a chat template") as refused:
        refuse_in(body)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "body",
    [{}, {"chat_template": None}, {"chat_template_kwargs": {"enable_thinking": True}}, {"chat_template_kwargs": 3}],
)
def test_other_settings_pass(body: dict[str, Any]) -> None:
    refuse_in(body)
