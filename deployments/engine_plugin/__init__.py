"""vLLM's entry point into Flywheel: what the CPU build of the engine needs to give right answers.

vLLM calls `register` in every process that it starts (API server, engine core, workers); our own engines call
it too, so that they are right also where the entry point is not installed. Importing this package is cheap
and touches neither vLLM nor torch. What is mended, and until when, stands in `mends`.
"""


def register() -> None:
    """Mend the CPU build of vLLM in this process; does nothing on other platforms, or when called again.

    Raises `DependencyError` if vLLM no longer has the place that a mend goes to: an engine that may answer
    wrongly must not start.
    """
    from deployments.engine_plugin.mends import apply

    apply()
