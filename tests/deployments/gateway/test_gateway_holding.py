"""What a gateway holds: bounded for what comes, counted for what goes, given back whatever happens."""

import pytest
from pydantic import ValidationError

from cluster.errors import RateLimitError
from deployments.gateway.config import GatewayConfig
from deployments.gateway.holding import Holding


def test_what_comes_is_refused_beyond_the_bound_and_the_rest_goes_on() -> None:
    holding = Holding(100)
    with holding.request() as first, holding.request() as second:
        first.take(60)
        second.take(40)
        with pytest.raises(RateLimitError, match=r"100 bytes .* 1 more .* limit of 100") as caught:
            second.take(1)
        assert caught.value.retry_after_s == 1
        assert holding.held_bytes == 100
    assert holding.held_bytes == 0


def test_what_goes_is_never_refused_but_leaves_no_room_for_more() -> None:
    holding = Holding(100)
    with holding.request() as one, holding.request() as other:
        one.take(50)
        with one.leaving(200):
            with pytest.raises(RateLimitError):
                other.take(1)
            other.take(0)
        other.take(50)
    assert holding.held_bytes == 0


def test_a_request_that_fails_gives_back_what_it_took() -> None:
    holding = Holding(10)
    with pytest.raises(ZeroDivisionError), holding.request() as one:  # noqa: PT012
        one.take(10)
        raise ZeroDivisionError
    assert holding.held_bytes == 0


def test_a_bound_below_the_largest_body_is_refused() -> None:
    with pytest.raises(ValidationError, match="max_held_bytes 2048 is less than max_request_bytes 4096"):
        GatewayConfig(max_request_bytes=4096, max_held_bytes=2048)
