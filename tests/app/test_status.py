"""`flywheel status` names the adapters that the replica could not load."""

import io
from typing import Any

import pytest
from rich.console import Console

from app.cli.status import _draw
from app.pipelines.status import Status


def drawn(health: Any) -> str:
    text = io.StringIO()
    gateway = {"url": "http://localhost:8000", "status": 200, "health": health}
    found = Status("/home", None, "Nothing runs.", {}, gateway, (), ())
    _draw(Console(file=text, width=160), found)
    return text.getvalue()


def test_a_failed_adapter_is_shown_with_its_reason() -> None:
    fault = {"why": "Adapter triage/3 cannot be loaded: its files are missing.", "at": "2026-12-02T22:00:00+00:00"}
    text = drawn({"llm": {"adapters_failed": {"triage/3": fault}, "keep_problems": {"tickets": "no such name"}}})
    assert "Adapters that could not be loaded" in text
    assert all(words in text for words in ("triage/3", "its files are missing", "2026-12-02T22:00:00", "no such name"))


def test_those_of_every_base_are_shown() -> None:
    fault = {"why": "its files are missing.", "at": "2026-12-02T22:00:00+00:00"}
    states = {"llm": {"adapters_failed": {"a/1": fault}}, "llm-other": {"adapters_failed": {"b/2": fault}}}
    assert all(version in drawn({"status": "ok", **states}) for version in ("a/1", "b/2"))


@pytest.mark.parametrize("health", ["refused", {}, {"llm": {"error": {"message": "no"}}}, {"llm": {"adapters": []}}])
def test_where_none_has_failed_there_is_no_table(health: Any) -> None:
    assert "could not be loaded" not in drawn(health)
