"""A side of a data version as a Ray Dataset, for training and bulk work.

Ray Data gives no order unless asked: whoever needs one sets `preserve_order`, or sorts by `row`.
"""

import ray.data
from ray.data.expressions import col

from actors.data.config import Split
from actors.data.version import DataVersion
from cluster.storage import Home


def dataset(version: DataVersion, split: Split, home: Home, *, limit: int | None = None) -> ray.data.Dataset:
    """All columns of a side, or of its first `limit` rows: the same rows in whatever order they are read.

    Tokens: `input_ids`, `labels`, `position_ids` (each int32 [max_length]), `sample_ids`, `row`.
    Examples: see `actors.data.examples.SCHEMAS`.
    """
    paths = version.shards(split, home)
    if limit is None or limit >= version.splits[split].rows:
        return ray.data.read_parquet([str(path) for path in paths])
    needed, rows = [], 0
    for path, shard in zip(paths, version.splits[split].files, strict=True):
        if rows < limit:
            needed.append(str(path))
        rows += shard.rows
    return ray.data.read_parquet(needed).filter(expr=col("row") < limit)
