"""Proof of what a run was trained on: the account in its last checkpoint against the seed and the data version.

Reads files; needs neither torch nor Ray, and no worker.
"""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from actors.data.version import DataVersion
from actors.training import columns
from actors.training.checkpoint import manifest
from actors.training.checkpoint.storage import open_storage
from actors.training.config import TrainConfig
from actors.training.ledger import Audit, Hashes, Ledger, SampleFacts, audit, sample_hash
from actors.training.order import Order
from actors.training.steps import ROW, SAMPLES, StepPlan
from cluster.errors import StateError
from cluster.storage import Home


def audit_run(run_id: str, config: TrainConfig, data: DataVersion, home: Home) -> Audit:
    """What the last committed checkpoint of a run was trained on; `config` and `data` are those of the run.

    `ConfigError` if it has no checkpoint yet, `StateError` if files of it or of the data
    version are not what they were.
    """
    storage = open_storage(home, run_id, config.checkpoint.storage)
    last = manifest.find(storage, None, run_id=run_id)
    written = last.files.get(manifest.LEDGER)
    if written is None or storage.digest(last.name, manifest.LEDGER) != written.sha256:
        raise StateError(
            f"{last.name} of run {run_id} {'has no account of its rows' if written is None else 'was changed'}.",
            hint=f"See `flywheel checkpoint verify {run_id}`.",
        )
    ledger = Ledger.from_json(storage.read(last.name, manifest.LEDGER).decode())
    batch = config.optimizer.global_batch_size
    plan = StepPlan(
        rows=data.splits["train"].rows, steps=last.step, global_batch_size=batch, micro_batch_size=1, world_size=1
    )
    order = Order.of(plan, seed=config.seed, shuffle=config.shuffle)
    return audit(ledger, order, step=last.step, batch=batch, samples=sample_facts(data, home))


def sample_facts(data: DataVersion, home: Home) -> SampleFacts:
    """The samples of each row of the training split; reads no tokens."""
    counts, hashes = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
    rows = 0
    for path, shard in zip(data.shards("train", home), data.splits["train"].files, strict=True):
        try:
            opened = pq.ParquetFile(path)
            fault = columns.fault(opened.schema_arrow)
            if fault is None and opened.metadata.num_rows != shard.rows:
                fault = f"has {opened.metadata.num_rows} rows, not the {shard.rows} rows it was published with"
            if fault is not None:
                raise StateError(f"{path} {fault}.", hint="Prepare the data version again.")
            for part in opened.iter_batches(columns=[ROW, SAMPLES]):
                if part.column(ROW).to_pylist() != list(range(rows, rows + part.num_rows)):
                    raise StateError(f"The rows in {path} are not numbered as they were.", hint="Prepare it again.")
                rows += part.num_rows
                counts.append(part.column(SAMPLES).value_lengths().to_numpy().astype(np.int64))
                hashes.append(_sums(part.column(SAMPLES).flatten(), counts[-1]))
        except (pa.ArrowException, OSError) as error:
            raise StateError(f"{path} cannot be read: {error}.", hint="Prepare the data version again.") from None
    return SampleFacts(np.concatenate(counts), np.concatenate(hashes))


def _sums(samples: pa.Array, counts: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> Hashes:
    """The sum of the hashes of the samples in each row, modulo 2^64."""
    each = np.array([sample_hash(sample) for sample in samples.to_pylist()], dtype=np.uint64)
    up_to = np.concatenate([np.zeros(1, np.uint64), np.cumsum(each, dtype=np.uint64)])
    ends = np.cumsum(counts)
    sums: Hashes = up_to[ends] - up_to[ends - counts]
    return sums
