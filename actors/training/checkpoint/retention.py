"""Which checkpoints may go: a pure rule over what is there. It deletes nothing and asks nobody."""

import math
from collections.abc import Collection, Sequence

from actors.training.checkpoint.manifest import Checkpoint
from actors.training.config import CheckpointConfig


def to_remove(
    checkpoints: Sequence[Checkpoint], policy: CheckpointConfig, protected: Collection[int] = ()
) -> tuple[Checkpoint, ...]:
    """Those of a run's committed checkpoints that neither the policy nor anybody else needs, oldest first.

    Kept are the newest `keep`, the best `best.keep` by their metric (of equals the newer; one without the metric, or
    with NaN, is never among them), and the steps in `protected`.
    """
    by_step = sorted(checkpoints, key=lambda checkpoint: checkpoint.step)
    kept = {checkpoint.step for checkpoint in by_step[-policy.keep :]} | set(protected)
    if policy.best is not None:
        metric, sign = policy.best.metric, 1 if policy.best.mode == "min" else -1
        measured = [each for each in by_step if not math.isnan(each.metrics.get(metric, math.nan))]
        ranked = sorted(measured, key=lambda each: (sign * each.metrics[metric], -each.step))
        kept |= {checkpoint.step for checkpoint in ranked[: policy.best.keep]}
    return tuple(checkpoint for checkpoint in by_step if checkpoint.step not in kept)
