"""Exact search by cosine, in blocks: what an index is measured against. Pure NumPy; knows neither models nor Ray."""

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]
Places = npt.NDArray[np.int64]

_BLOCK_SCORES = 4_000_000
"""Similarities that are held at once: 16 MB."""


def cut(vectors: Vectors, dimension: int) -> Vectors:
    """The first `dimension` numbers of each of `vectors` [N, D], at length 1 again; zeros stay zeros."""
    if not 1 <= dimension <= vectors.shape[1]:
        raise ValueError(f"vectors of {vectors.shape[1]} numbers have no first {dimension}")
    kept = vectors[:, :dimension].astype(np.float32)
    lengths = np.linalg.norm(kept, axis=1, keepdims=True)
    return np.asarray(kept / np.where(lengths > 0, lengths, 1), dtype=np.float32)


def nearest(
    queries: Vectors, documents: Vectors, k: int, *, block_scores: int = _BLOCK_SCORES
) -> npt.NDArray[np.int64]:
    """[Q, min(k, N)] places of the documents nearest to each query, the best first; of equals the first in order.

    Both are of length 1, so that the product is the cosine. A block of queries meets all documents.
    """
    k = min(k, len(documents))
    found = np.empty((len(queries), k), dtype=np.int64)
    rows = max(1, block_scores // max(1, len(documents)))
    for begin in range(0, len(queries), rows):
        scores = queries[begin : begin + rows] @ documents.T
        if k < len(documents):
            # argpartition breaks ties as it likes, so whatever equals the k-th best takes part in the sort.
            edge = -np.partition(-scores, k - 1, axis=1)[:, k - 1 : k]
            scores = np.where(scores >= edge, scores, -np.inf)
        found[begin : begin + rows] = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return found
