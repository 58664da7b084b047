import pytest

from actors.registry.config import RegisterConfig
from cluster.config import parse
from cluster.errors import ConfigError


@pytest.mark.parametrize(
    "settings", [{"name": "Triage"}, {"name": "a", "on_pass": "latest"}, {"name": "a", "on_pass": "v2"}]
)
def test_names_that_could_not_be_registered_are_refused_before_anything_runs(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(reversed(settings.values()))):
        parse(RegisterConfig, settings, source="recipe")


def test_nothing_moves_if_no_alias_is_named() -> None:
    assert parse(RegisterConfig, {"name": "a", "on_pass": None}, source="recipe").on_pass is None
