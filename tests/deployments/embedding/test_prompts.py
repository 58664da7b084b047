"""Which text stands before which input, and that vectors made with another are not taken for the same."""

import pytest

from deployments.embedding.config import PromptsConfig
from deployments.embedding.prompts import Prompts, chosen

E5 = {"query": "query: ", "document": "", "passage": "passage: "}


@pytest.mark.parametrize(
    ("of_model", "default", "settings", "expected"),
    [
        ({}, None, {}, Prompts()),
        ({"query": None, "document": None}, None, {}, Prompts()),
        (E5, None, {}, Prompts("", "query: ", "passage: ")),
        (E5, "passage", {}, Prompts("passage: ", "query: ", "passage: ")),
        ({"document": "d ", "passage": "p "}, "gone", {}, Prompts("", "", "d ")),
        ({"query": "q "}, None, {}, Prompts("", "q ", "")),
        (E5, "query", {"query": "ask: ", "document": ""}, Prompts("query: ", "ask: ", "")),
        ({"any": "any: ", "query": "", "document": None}, "any", {}, Prompts("any: ", "any: ", "any: ")),
        ({"any": "any: "}, "any", {"query": ""}, Prompts("any: ", "", "any: ")),
        ({"any": "any: "}, "any", {"default": ""}, Prompts()),
        ({}, None, {"default": "any: "}, Prompts("any: ", "any: ", "any: ")),
    ],
)
def test_the_models_own_unless_the_settings_say_otherwise(
    of_model: dict[str, str | None], default: str | None, settings: dict[str, str], expected: Prompts
) -> None:
    prompts = chosen(of_model, default, PromptsConfig(**settings))
    assert prompts == expected
    assert [prompts.before(kind) for kind in (None, "query", "document")] == list(expected.all)
