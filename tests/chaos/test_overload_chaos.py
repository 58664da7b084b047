"""Three times as much is asked for as the engine can do, and it goes on doing what it can."""

import pytest

from app.bench.overload import GOODPUT_BAR, Size, run
from cluster.progress import silent

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


def test_goodput_holds_at_three_times_the_capacity() -> None:
    found = run(Size.short(), silent)
    print({result.name: result.median for result in found.results})  # noqa: T201 (what `make chaos` is run to see)
    bars = {bar.name: bar.value for bar in found.bars}
    assert bars["goodput over the peak"] >= GOODPUT_BAR
    assert bars["429 that say when to ask again"] == 1.0
    assert bars["other faults at 3 ×"] == 0
