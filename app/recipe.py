"""A recipe: one YAML file that says everything about a turn of the wheel.

This root only composes the parts' own `Config` classes and checks what no single part can see.
It imports neither ray, torch nor vllm, so `flywheel plan` answers at once.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from actors.data.config import DataConfig
from actors.evaluation.config import EvaluateConfig
from actors.registry.config import RegisterConfig
from actors.training.config import TrainConfig
from cluster.config import Config, nearest, override, parse, read_yaml
from cluster.errors import ConfigError
from deployments.config import ServeConfig

RECIPES = Path(__file__).parent / "recipes"


class ModelConfig(Config):
    """The model a run starts from."""

    base: str
    """Name in the model store, Hugging Face id, or path of a folder."""


class IndexConfig(Config):
    """Which documents are indexed, and what asks for them."""

    collection: str
    source: str
    documents: int = Field(default=2000, ge=1)
    queries: int = Field(default=200, ge=1)


class Recipe(TrainConfig):
    """Everything about one turn of the wheel. Training's settings stand at the top, as in DESIGN's example."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    model: ModelConfig
    data: DataConfig
    evaluate: EvaluateConfig = EvaluateConfig()
    registration: RegisterConfig | None = Field(default=None, alias="register")
    serve: ServeConfig | None = None
    index: IndexConfig | None = None

    @model_validator(mode="after")
    def _is_measured_by_what_it_learns(self) -> Self:
        suite = {"sft": "exact-match", "contrastive": "retrieval"}[self.objective.kind]
        if self.evaluate.suites[0] != suite:
            raise ValueError(
                f"evaluate.suites {list(self.evaluate.suites)} cannot measure objective {self.objective.kind}: "
                f"set evaluate.suites to [{suite}]"
            )
        return self

    @model_validator(mode="after")
    def _mines_for_pairs(self) -> Self:
        if self.data.negatives is not None and self.objective.kind != "contrastive":
            raise ValueError(
                f"data.negatives is set, but objective {self.objective.kind} learns from none: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        engine = self.serve.engine_of(self.model.base) if self.serve else None
        if engine and self.adapter.kind == "lora" and self.adapter.r > engine.max_lora_rank:
            raise ValueError(
                f"adapter.r {self.adapter.r} is more than serve.llm.max_lora_rank {engine.max_lora_rank}: "
                "the engine could not load what this run trains"
            )
        if engine and self.data.max_length > engine.max_model_len:
            raise ValueError(
                f"data.max_length {self.data.max_length} is more than serve.llm.max_model_len {engine.max_model_len}"
            )
        return self


def load(reference: str | Path, assignments: Sequence[str] = ()) -> Recipe:
    """The recipe in a file, or the shipped one of that name, with `a.b=c` assignments applied."""
    path = find(reference)
    return parse(Recipe, override(read_yaml(path), assignments), source=str(path))


def find(reference: str | Path) -> Path:
    """Path of a recipe given by path or by the name of a shipped one; `ConfigError` lists the shipped ones."""
    path = Path(reference)
    if path.is_file():
        return path
    known = shipped()
    if str(reference) in known:
        return known[str(reference)]
    meant = nearest(str(reference), known)
    raise ConfigError(
        f"There is no recipe {str(reference)!r}{f'; did you mean {meant!r}?' if meant else '.'}",
        hint=f"Give the path of a YAML file, or one of: {', '.join(known)}.",
    )


def shipped() -> dict[str, Path]:
    """The recipes that come with Flywheel, by name."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}
