"""Build or buy: what a million output tokens costs on a machine that is paid by the hour, beside an API's price."""

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Final

from pydantic import Field

from cluster.config import Config, parse, read_yaml

SHIPPED: Final = Path(__file__).with_name("prices.yaml")


class _Price(Config):
    name: str = Field(min_length=1)
    source: str = Field(min_length=1)
    """Who says so."""
    as_of: date
    """When they said so."""


class Machine(_Price):
    """A machine that is paid by the hour, busy or not."""

    usd_per_hour: float = Field(gt=0)


class Api(_Price):
    """A model that is paid by the token."""

    usd_per_million_input_tokens: float = Field(ge=0)
    usd_per_million_output_tokens: float = Field(gt=0)


class Prices(Config):
    """What a user pays, or would pay."""

    machines: tuple[Machine, ...] = Field(min_length=1)
    apis: tuple[Api, ...] = ()


class Speed(Config):
    """What a server was measured to do with all its streams busy."""

    server: str
    streams: int
    tokens_per_s: float = Field(gt=0)
    p99_between_tokens_ms: float | None = None
    """None of a server that does not stream."""


class Offer(Config):
    """One line of the table. A price includes the prompts."""

    what: str
    usd_per_million_output_tokens: float
    p99_between_tokens_ms: float | None
    streams: int | None
    source: str
    as_of: date


def read(path: Path | None = None) -> Prices:
    """The prices in a YAML file; default: the examples that ship. `ConfigError` names what is wrong."""
    path = path or SHIPPED
    return parse(Prices, read_yaml(path), source=str(path))


def compare(prices: Prices, speeds: Sequence[Speed], *, prompt_tokens_per_output: float) -> list[Offer]:
    """Every server on every machine, then every API on the same requests. A machine is counted as busy all hour."""
    built = [
        Offer(
            what=f"{speed.server} on {machine.name}",
            usd_per_million_output_tokens=_worth(machine.usd_per_hour / (speed.tokens_per_s * 3600) * 1e6),
            p99_between_tokens_ms=speed.p99_between_tokens_ms,
            streams=speed.streams,
            source=machine.source,
            as_of=machine.as_of,
        )
        for machine in prices.machines
        for speed in speeds
    ]
    bought = [
        Offer(
            what=api.name,
            usd_per_million_output_tokens=_worth(
                api.usd_per_million_output_tokens + prompt_tokens_per_output * api.usd_per_million_input_tokens
            ),
            p99_between_tokens_ms=None,
            streams=None,
            source=api.source,
            as_of=api.as_of,
        )
        for api in prices.apis
    ]
    return built + bought


def _worth(value: float) -> float:
    return float(f"{value:.4g}")
