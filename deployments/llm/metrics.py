"""Adapters on a replica, for Ray's metrics: what is resident and what came and went, not what was asked for."""

from collections.abc import Iterable

from ray.serve import metrics


class AdapterMetrics:
    """Told what is resident after each change. Needs a running replica, whose tags Serve adds."""

    def __init__(self) -> None:
        self._resident = metrics.Gauge(
            "flywheel_llm_adapter_resident", "1 while the engine holds this version.", tag_keys=("version",)
        )
        self._loads = metrics.Counter("flywheel_llm_adapter_loads", "Adapters that were brought into the engine.")
        self._evictions = metrics.Counter("flywheel_llm_adapter_evictions", "Adapters that made room for others.")
        self._known: frozenset[str] = frozenset()

    def show(self, versions: Iterable[str]) -> None:
        """These are resident now."""
        now = frozenset(versions)
        for version in now ^ self._known:
            self._resident.set(int(version in now), tags={"version": version})
        if came := len(now - self._known):
            self._loads.inc(came)
        if gone := len(self._known - now):
            self._evictions.inc(gone)
        self._known = now
