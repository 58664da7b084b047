"""Vectors of many texts, computed by Ray workers that each load the model once.

The shell around sentence-transformers' own `encode`, which sorts by length. Knows nothing of rankings.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

import numpy as np
import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util import ActorPool, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.evaluation.search import Vectors
from cluster.errors import CapacityError, ConfigError, DependencyError, FlywheelError
from cluster.models import StoredModel, require_signed
from cluster.progress import Progress, Sink, silent
from cluster.signing import Verifier
from cluster.storage import Home

Dtype = Literal["bfloat16", "float32"]

PLACEMENT_WAIT_S: Final = 300.0
"""An autoscaler needs minutes for a node; who waits longer for a place is told so."""
_TEXTS_PER_CALL = 512
_TEXTS_PER_WORKER = 1500
"""A worker takes seconds to start: below so many texts another one costs more than it saves."""
_TEXTS_PER_PASS = 32


class EmbeddingWorker:
    """One model in one process. `SignatureError` if nobody who is trusted vouches for its files.

    Reads at most `max_tokens` of a text, or what the model reads where that is less or None is given.
    """

    def __init__(
        self, model: StoredModel, home: Home, dtype: Dtype, max_tokens: int | None = None, gpu: bool = False
    ) -> None:
        import torch  # heavy, and needed by the worker only
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        require_signed(model, home, Verifier())
        self._model = SentenceTransformer(
            str(model.path),
            device="cuda" if gpu else "cpu",
            local_files_only=True,
            model_kwargs={"dtype": getattr(torch, dtype)},
        ).eval()
        limits = [limit for limit in (self._model.max_seq_length, max_tokens) if limit is not None]
        self._model.max_seq_length = min(limits, default=None)

    def embed(self, texts: Sequence[str]) -> Vectors:
        """[N, D] float32, at length 1; what is longer than it reads is read as far as that."""
        given = self._model.encode(
            list(texts),
            batch_size=_TEXTS_PER_PASS,
            convert_to_numpy=False,
            convert_to_tensor=True,
            normalize_embeddings=True,
            show_progress_bar=False,
        )
        return np.asarray(given.float().cpu().numpy(), dtype=np.float32)


def embed(
    model: StoredModel,
    texts: Sequence[str],
    home: Home,
    *,
    dtype: Dtype = "float32",
    max_tokens: int | None = None,
    sink: Sink = silent,
    wait_s: float = PLACEMENT_WAIT_S,
) -> Vectors:
    """Vectors [N, D] of `texts` in their order, by as many workers as the cluster has room and the texts need.

    Raises `ConfigError` if the model is no embedder, `CapacityError` if no worker finds a place within `wait_s`,
    `DependencyError` if one dies.
    """
    if model.kind != "sentence-embedder":
        raise ConfigError(f"{model.name} is a {model.kind}; it makes no vectors.", hint="Give an embedder.")
    parts = [texts[begin : begin + _TEXTS_PER_CALL] for begin in range(0, len(texts), _TEXTS_PER_CALL)]
    vectors: list[Vectors] = []
    with _workers(model, home, dtype, max_tokens, -(-len(texts) // _TEXTS_PER_WORKER), wait_s) as workers:
        pool = ActorPool(workers)
        for done in pool.map(lambda worker, part: worker.embed.remote(part), parts):  # in the order of the parts
            vectors.append(done)
            sink(Progress("evaluate", sum(map(len, vectors)), len(texts), "texts", note=f"embedded by {model.name}"))
    return np.concatenate(vectors)


@contextmanager
def _workers(
    model: StoredModel, home: Home, dtype: Dtype, max_tokens: int | None, wanted: int, wait_s: float
) -> Iterator[list[Any]]:
    gpu = ray.cluster_resources().get("GPU", 0) >= 1
    with _placed({"CPU": 1.0, "GPU": 1.0} if gpu else {"CPU": 1.0}, wanted, wait_s) as (group, places):
        try:
            yield [
                ray.remote(EmbeddingWorker)
                .options(
                    num_cpus=1,
                    num_gpus=1 if gpu else 0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place),
                )
                .remote(model, home, dtype, max_tokens, gpu=gpu)
                for place in range(places)
            ]
        except (RayActorError, RayTaskError) as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if isinstance(cause, FlywheelError):
                raise cause from None
            lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
            raise DependencyError(
                f"An embedding worker failed on {model.name}: {lines[-1] if lines else type(cause).__name__}",
                hint="The worker's log in Ray's log folder has the rest.",
                retryable=False,
            ) from None


@contextmanager
def _placed(needs: dict[str, float], wanted: int, wait_s: float) -> Iterator[tuple[Any, int]]:
    """Room for up to `wanted` workers that each need `needs`, held and then given back with all that runs in it.

    An actor without a place would wait without end, and so would whoever waits for its answer.
    """
    free = ray.available_resources()
    room = int(min(free.get(name, 0) / amount for name, amount in needs.items()))
    places = max(1, min(wanted, room))
    group = placement_group([needs] * places)
    try:
        if not group.wait(wait_s):
            all_of = ray.cluster_resources()
            free = ray.available_resources()
            raise CapacityError(
                f"No embedding worker found a place within {wait_s:g} s: "
                + ", ".join(f"{free.get(name, 0):g} of {all_of.get(name, 0):g} {name} are free" for name in needs)
                + f", it takes {places:g} of each.",
                hint="End what holds them (`ray status` shows it), or add a node.",
                retry_after_s=wait_s,
            )
        yield group, places
    finally:
        remove_placement_group(group)
