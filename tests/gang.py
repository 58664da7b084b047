"""The gang that tests share is the benches'."""

from app.bench.gang import Gang

__all__ = ["Gang"]
