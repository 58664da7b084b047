"""A run of the whole model: what is refused before it has cost an hour."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from actors.registry.client import RegistryClient
from actors.registry.snapshot import Kind
from actors.registry.views import ModelView
from app import recipe as recipes
from app.pipelines import stages
from cluster.errors import ConfigError
from cluster.progress import silent
from cluster.storage import Home
from cluster.tracking import MemoryTracker


class Lists:
    """The part of the registry's client that knows which names there are."""

    def __init__(self, *models: ModelView) -> None:
        self._models = models

    def list(self) -> tuple[ModelView, ...]:
        return self._models


def listed(name: str, kind: Kind) -> ModelView:
    return ModelView(name=name, kind=kind, base="smol", versions=(), stages=(), aliases={}, splits={})


@pytest.fixture
def ground(tmp_path: Path) -> Callable[..., stages.Ground]:
    def made(registry: Lists, *settings: str) -> stages.Ground:
        recipe = recipes.load("error-triage", settings)
        return stages.Ground(recipe, Home(tmp_path), cast(RegistryClient, registry), MemoryTracker(), "memory", silent)

    return made


@pytest.mark.parametrize(("adapter", "makes", "there"), [("none", "model", "adapter"), ("lora", "adapter", "model")])
def test_a_name_of_another_kind_is_refused_before_the_training(
    ground: Callable[..., stages.Ground], adapter: str, makes: Kind, there: Kind
) -> None:
    registry = Lists(listed("error-triage", there), listed("others", makes))
    with pytest.raises(ConfigError, match=f"'error-triage' holds versions of kind {there}") as caught:
        stages.require_kind(ground(registry, f"adapter.kind={adapter}"))
    assert f"register.name=error-triage-{makes}" in str(caught.value.hint)
    stages.require_kind(ground(registry, f"adapter.kind={adapter}", "register.name=others"))
    stages.require_kind(ground(registry, f"adapter.kind={adapter}", "register.name=fresh"))
    stages.require_kind(ground(registry, f"adapter.kind={adapter}", "register=null"))
