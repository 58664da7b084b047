"""What a run was trained on: an account of every row, small enough to stand in each checkpoint.

Each rank notes the rows it takes. At a checkpoint the notes of all ranks are merged with the account of the
checkpoint that the run went on from, so that the account in a checkpoint is exactly that of the weights beside it:
rows of steps that were lost and done again are in it once, as in the weights.

An account says which positions of the run were taken, how often, and holds two digests: of the rows that were really
read at these positions, and of the ids of the samples in them. Digests are sums of 64-bit hashes, so it does not
matter who noted what in which order. Whoever has the seed and the data version can compute them again: that is what
`audit` does. Pure: no torch, no Ray, no files.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from actors.training.order import Order, Rows
from cluster.errors import TrainingError

Hashes = npt.NDArray[np.uint64]

_FORMAT = 1
_MASK = 2**64 - 1


class Span(NamedTuple):
    """Positions from `begin` to before `end`, each taken `times` times."""

    begin: int
    end: int
    times: int


@dataclass(frozen=True)
class EpochAccount:
    """Of one epoch: `spans` in order, without overlap; digests are sums modulo 2^64."""

    spans: tuple[Span, ...] = ()
    rows_digest: int = 0
    samples: int = 0
    samples_digest: int = 0

    def merge(self, other: "EpochAccount") -> "EpochAccount":
        return EpochAccount(
            spans=_flat([*self.spans, *other.spans]),
            rows_digest=(self.rows_digest + other.rows_digest) & _MASK,
            samples=self.samples + other.samples,
            samples_digest=(self.samples_digest + other.samples_digest) & _MASK,
        )


@dataclass(frozen=True)
class Ledger:
    """The account of a run, or of a part of it. Merging is associative and commutative."""

    order: Order
    epochs: Mapping[int, EpochAccount] = field(default_factory=dict)

    def merge(self, other: "Ledger") -> "Ledger":
        """The account of both; `TrainingError` if they are not of rows in the same order."""
        if self.order != other.order:
            raise TrainingError(
                f"The rows of this run stood in another order before: {other.order}, not {self.order}.",
                hint="Go on with the seed, the data version and the batch it was begun with, or start a new run.",
            )
        # Only what is new is worked on: a long run has thousands of epochs, and most are over.
        changed = {epoch: self.epochs.get(epoch, EpochAccount()).merge(one) for epoch, one in other.epochs.items()}
        return Ledger(self.order, {**self.epochs, **changed})

    def merge_all(self, segments: Iterable["Ledger"]) -> "Ledger":
        """This account and those of all ranks since."""
        return self.merge(reduce(Ledger.merge, segments, Ledger(self.order)))

    def to_json(self) -> str:
        return json.dumps(
            {
                "format": _FORMAT,
                "order": asdict(self.order),
                "epochs": [{"epoch": epoch, **vars(account)} for epoch, account in sorted(self.epochs.items())],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "Ledger":
        """What `to_json` gave; `TrainingError` if it is something else."""
        try:
            facts: dict[str, Any] = json.loads(text)
            if facts["format"] != _FORMAT:
                raise ValueError(f"format {facts['format']}")
            epochs = {}
            for account in facts["epochs"]:
                epoch, spans = account.pop("epoch"), account.pop("spans")
                epochs[epoch] = EpochAccount(spans=tuple(Span(*span) for span in spans), **account)
            return cls(Order(**facts["order"]), epochs)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise TrainingError(
                f"The account of the rows of this run cannot be read: {error!r}.", hint="Start a new run."
            ) from None


class Notes:
    """What one rank takes between two checkpoints."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._epochs: dict[int, EpochAccount] = {}
        self._spans: dict[int, list[Span]] = {}

    def add(self, positions: Rows, rows: Rows, samples: Sequence[str]) -> None:
        """Rows of one epoch, taken once: `rows[i]` was read at `positions[i]`; `samples` are all ids in them."""
        epoch = int(positions[0]) // self._order.epoch_rows
        before = self._epochs.get(epoch, EpochAccount())
        self._epochs[epoch] = EpochAccount(
            rows_digest=(before.rows_digest + _sum(row_hashes(positions, rows))) & _MASK,
            samples=before.samples + len(samples),
            samples_digest=(before.samples_digest + sum(map(sample_hash, samples))) & _MASK,
        )
        spans = self._spans.setdefault(epoch, [])
        for position in positions.tolist():
            if spans and spans[-1].end == position:
                spans[-1] = Span(spans[-1].begin, position + 1, 1)
            else:
                spans.append(Span(position, position + 1, 1))

    def take(self) -> Ledger:
        """All notes since the last call."""
        taken = {
            epoch: account.merge(EpochAccount(spans=tuple(self._spans[epoch])))
            for epoch, account in self._epochs.items()
        }
        self._epochs, self._spans = {}, {}
        return Ledger(self._order, taken)


@dataclass(frozen=True)
class SampleFacts:
    """What the data version says of the samples in each row: how many, and the sum of their hashes."""

    counts: npt.NDArray[np.int64]
    hashes: Hashes


@dataclass(frozen=True)
class EpochAudit:
    """One epoch of an `Audit`. `unused`: rows of the split that the epoch leaves out, as they fill no batch."""

    epoch: int
    seen: int
    lost: int
    repeated: int
    samples: int
    unused: int


@dataclass(frozen=True)
class Audit:
    """What `step` steps were trained on, against what they had to be trained on.

    `seen` counts rows that were trained on at all, `lost` those that were not and had to be, `repeated` each time
    too many. `proven`: the digests are those of the rows and samples that the seed and the data version give.
    `doubts` say what is not as it has to be.
    """

    step: int
    seen: int
    lost: int
    repeated: int
    samples: int
    proven: bool
    epochs: tuple[EpochAudit, ...]
    doubts: tuple[str, ...]

    @property
    def exact(self) -> bool:
        return self.proven and not self.lost and not self.repeated


def audit(ledger: Ledger, order: Order, *, step: int, batch: int, samples: SampleFacts | None = None) -> Audit:
    """Hold `ledger` against `step` steps of `batch` rows in `order`; without `samples` only the rows are proven."""
    doubts = []
    if ledger.order != order:
        doubts.append(f"the rows stood in another order: {ledger.order}, not {order}")
    if samples is not None and len(samples.counts) != order.rows:
        doubts.append(f"the data version has {len(samples.counts)} rows, not {order.rows}")
        samples = None
    due = step * batch
    audited = []
    for epoch in range(max([-(-due // order.epoch_rows), *(number + 1 for number in ledger.epochs)], default=0)):
        account = ledger.epochs.get(epoch, EpochAccount())
        begin = epoch * order.epoch_rows
        end = max(begin, min(begin + order.epoch_rows, due))
        seen = sum(max(0, min(span.end, end) - max(span.begin, begin)) for span in account.spans)
        taken = sum((span.end - span.begin) * span.times for span in account.spans)
        audited.append(
            EpochAudit(
                epoch=epoch,
                seen=seen,
                lost=end - begin - seen,
                # What lies beyond the last step is taken again by the steps to come.
                repeated=taken - seen,
                samples=account.samples,
                unused=order.rows - order.epoch_rows,
            )
        )
        doubts += [f"epoch {epoch}: {doubt}" for doubt in _doubts(account, order, samples)]
    return Audit(
        step=step,
        seen=sum(one.seen for one in audited),
        lost=sum(one.lost for one in audited),
        repeated=sum(one.repeated for one in audited),
        samples=sum(one.samples for one in audited),
        proven=not doubts,
        epochs=tuple(audited),
        doubts=tuple(doubts),
    )


def _doubts(account: EpochAccount, order: Order, samples: SampleFacts | None) -> list[str]:
    rows_digest = count = samples_digest = 0
    for span in account.spans:
        for piece in order.pieces(span.begin, span.end):
            positions = np.arange(piece.position, piece.position + len(piece.rows))
            rows_digest += span.times * _sum(row_hashes(positions, piece.rows))
            if samples is not None:
                count += span.times * int(samples.counts[piece.rows].sum())
                samples_digest += span.times * _sum(samples.hashes[piece.rows])
    doubts = []
    if rows_digest & _MASK != account.rows_digest:
        doubts.append("other rows were read than stand at these positions")
    if samples is not None and (count, samples_digest & _MASK) != (account.samples, account.samples_digest):
        doubts.append(f"other samples were read than the data version has ({account.samples}, not {count})")
    return doubts


def row_hashes(positions: Rows, rows: Rows) -> Hashes:
    """A hash of each pair, so that a row at another position than its own is another row."""
    return _mixed(_mixed(positions.astype(np.uint64)) ^ rows.astype(np.uint64))


def sample_hash(sample: str) -> int:
    """64 bits of BLAKE2b."""
    digest = hashlib.blake2b(sample.encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _mixed(values: Hashes) -> Hashes:
    """SplitMix64 (Steele, Lea and Flood 2014), vectorised; overflow is meant."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _sum(hashes: Hashes) -> int:
    return int(hashes.sum(dtype=np.uint64))


def _flat(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The same positions as often, in order and in as few spans as can be."""
    changes: dict[int, int] = {}
    for span in spans:
        changes[span.begin] = changes.get(span.begin, 0) + span.times
        changes[span.end] = changes.get(span.end, 0) - span.times
    flat: list[Span] = []
    begin, times = 0, 0
    for position in sorted(changes):
        if times and changes[position]:
            flat.append(Span(begin, position, times))
        if changes[position]:
            begin, times = position, times + changes[position]
    return tuple(flat)
