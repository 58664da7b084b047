"""The gateway's own numbers, as Prometheus text. Labels are bounded: an unknown route or model is one label."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from deployments.gateway.usage import Usage

UNMATCHED = "unmatched"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class GatewayMetrics:
    """Requests, latency and tokens of one gateway replica. `usage` counts them by version for the registry."""

    def __init__(self, usage: Usage | None = None) -> None:
        self.usage = usage or Usage()
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "flywheel_gateway_requests",
            "Requests answered.",
            ["route", "model", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "flywheel_gateway_request_seconds",
            "From the first byte in to the last byte out.",
            ["route", "model"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._tokens = Counter(
            "flywheel_gateway_tokens",
            "Tokens of answered requests.",
            ["model", "direction"],
            registry=self._registry,
        )
        self._broken = Counter(
            "flywheel_gateway_broken_streams",
            "Streams that ended with an error event.",
            ["model"],
            registry=self._registry,
        )

    def answered(
        self, *, route: str, model: str, status: int, seconds: float, version: str | None = None, broke: bool = False
    ) -> None:
        """One request is over.

        `version`: the one that had to answer it, once that was known; `broke`: its stream ended with an error event.
        """
        if version is not None:
            self.usage.answered(version, failed=broke or status >= 500 or status == 408)
        if broke:
            self._broken.labels(model).inc()
        self._requests.labels(route, model, str(status)).inc()
        self._seconds.labels(route, model).observe(seconds)

    def tokens(self, *, model: str, version: str, prompt: int, completion: int) -> None:
        """Tokens that one answer took in and gave out."""
        self.usage.tokens(version, prompt=prompt, completion=completion)
        self._tokens.labels(model, "prompt").inc(prompt)
        self._tokens.labels(model, "completion").inc(completion)

    def render(self) -> bytes:
        """Prometheus text format 0.0.4."""
        return bytes(generate_latest(self._registry))
