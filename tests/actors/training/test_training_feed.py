"""What the feed's Ray tasks read: the rows of each share from the files of a split, wherever a run goes on."""

import errno
import itertools
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.training import feed
from actors.training.order import Order
from actors.training.steps import StepPlan
from cluster.errors import DependencyError, StateError
from tests.actors.training.small import packed_rows

ROWS, STEPS, BATCH = 61, 40, 4
PLAN = StepPlan(rows=ROWS, steps=STEPS, global_batch_size=BATCH, micro_batch_size=1, world_size=1)
ORDER = Order(rows=ROWS, epoch_rows=PLAN.rows_per_epoch, seed=1, chunk_rows=5, window_chunks=3)


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return packed_rows(ROWS, length=16, seed=2)


def stream(table: pa.Table, folder: Path, *, cuts: tuple[int, ...] = (0, 13, 40, ROWS), group: int = 5) -> feed.Stream:
    """The table in files that are cut anywhere, in row groups of `group`."""
    files: list[Path] = []
    for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
        files.append(folder / f"train-{number}.parquet")
        pq.write_table(table.slice(begin, end - begin), files[-1], row_group_size=group)
    sizes = tuple(end - begin for begin, end in itertools.pairwise(cuts))
    return feed.Stream(tuple(files), sizes, ORDER, STEPS, BATCH, begin=int)


def read(source: feed.Stream, begin: int, end: int, shares: int) -> list[pa.Table]:
    return [share for whole in feed._read(source, begin, end, shares) for share in feed.rows_of(whole)]


@pytest.mark.parametrize("group", [1, 5, 7, 1000])
@pytest.mark.parametrize(("begin", "shares"), [(0, 1), (13, 2), (29, 4)])
def test_shares_hold_the_rows_of_their_positions(
    table: pa.Table, tmp_path: Path, group: int, begin: int, shares: int
) -> None:
    """Row groups may be of any size, as versions of older releases have them; an epoch ends in step 15 and 30."""
    found = read(stream(table, tmp_path, group=group), begin, 33, shares)
    assert len(found) == (33 - begin) * shares
    whole = pa.concat_tables(found)
    positions = list(range(begin * BATCH, 33 * BATCH))
    assert whole.column("position").to_pylist() == positions
    expected = table.take(ORDER.rows_at(positions[0], positions[-1] + 1))
    assert whole.select(expected.column_names).to_pylist() == expected.to_pylist()


def test_a_window_is_read_once(table: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading costs what is in the data, however small the batches: an epoch reads each of the 13 groups once."""
    source = stream(table, tmp_path, cuts=(0, 15, 40, ROWS))
    opened: list[object] = []
    original = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda self, *a, **k: opened.append(a) or original(self, *a, **k)
    )
    read(source, 0, 15, 4)
    assert 12 <= len(opened) <= 13  # the last one holds one row, which an epoch may leave out


def test_tasks_cover_the_run_from_where_it_goes_on(table: pa.Table, tmp_path: Path) -> None:
    source = stream(table, tmp_path)
    for first in (0, 17, 39):
        tasks = feed._Shares(source, first).get_read_tasks(2)
        steps = [step for task in tasks for step in range(*task.read_fn.args[1:3])]  # type: ignore[attr-defined]
        assert steps == list(range(first, STEPS))
    assert feed._Shares(source, STEPS).get_read_tasks(2) == []


def test_a_long_run_has_a_bounded_number_of_tasks(table: pa.Table, tmp_path: Path) -> None:
    source = feed.Stream((), (), ORDER, 10**7, BATCH, begin=int)
    assert len(feed._Shares(source, 0).get_read_tasks(2)) <= 1000


def test_rows_that_are_not_numbered_as_they_were_are_not_trained_on(table: pa.Table, tmp_path: Path) -> None:
    numbers = table.column("row").to_pylist()
    numbers[3], numbers[4] = numbers[4], numbers[3]
    changed = table.set_column(table.column_names.index("row"), "row", pa.array(numbers))
    with pytest.raises(StateError, match="not numbered as they were"):
        read(stream(changed, tmp_path), 0, 15, 1)


def rewritten(source: feed.Stream, number: int, table: pa.Table) -> feed.Stream:
    """`source` after somebody has put another table into one of its files."""
    pq.write_table(table, source.files[number], row_group_size=5)
    return source


def test_a_file_that_is_gone_cut_off_or_no_parquet_is_named(table: pa.Table, tmp_path: Path) -> None:
    source = stream(table, tmp_path)
    written = source.files[1].read_bytes()
    for damaged in (b"nothing", b"", written[: len(written) // 2], b"PAR1" * 20 + written[-40:]):
        source.files[1].write_bytes(damaged)
        with pytest.raises(StateError, match=r"train-1\.parquet cannot be read") as caught:
            read(source, 0, 15, 1)
        assert f"Delete {tmp_path} and prepare it again" in str(caught.value.hint)
    source.files[1].unlink()
    with pytest.raises(StateError, match=r"train-1\.parquet cannot be read"):
        read(source, 0, 15, 1)


def test_pages_that_are_damaged_are_not_trained_on(table: pa.Table, tmp_path: Path) -> None:
    """The footer is whole, so the file opens; what is in it cannot be unpacked."""
    source = stream(table, tmp_path)
    written = bytearray(source.files[1].read_bytes())
    written[4:400] = b"\xff" * 396
    source.files[1].write_bytes(written)
    with pytest.raises(StateError, match=r"train-1\.parquet cannot be read"):
        read(source, 0, 15, 1)


def test_a_storage_that_fails_is_no_damage_and_may_be_tried_again(
    table: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told to delete data because a network file system was away."""
    source = stream(table, tmp_path)

    def away(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    for name in ("read_metadata", "ParquetFile"):
        with monkeypatch.context() as patched:
            patched.setattr(pq, name, away)
            with pytest.raises(DependencyError, match=r"train-\d\.parquet cannot be read: .*Stale") as caught:
                read(source, 0, 15, 1)
        assert caught.value.retryable
        assert str(tmp_path) in str(caught.value.hint)
        assert "Delete" not in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("row", pa.array(["0"] * 27), "has string as row"),
        ("sample_ids", pa.array(["s"] * 27), "has string as sample_ids"),
        ("sample_ids", pa.array([[1]] * 27), "has list<.*int64> as sample_ids"),
        ("labels", pa.array([[0.5]] * 27), "has list<.*double> as labels"),
        ("labels", None, "has no labels"),
    ],
)
def test_a_file_of_other_columns_is_named_with_the_column(
    table: pa.Table, tmp_path: Path, name: str, values: pa.Array | None, said: str
) -> None:
    part = table.slice(13, 27).drop_columns([name])
    foreign = part if values is None else part.append_column(name, values)
    with pytest.raises(StateError, match=rf"train-1\.parquet {said}"):
        read(rewritten(stream(table, tmp_path), 1, foreign), 0, 15, 1)


def test_files_with_lists_of_two_kinds_are_refused(table: pa.Table, tmp_path: Path) -> None:
    wide = table.slice(13, 27)
    at = wide.column_names.index("labels")
    wide = wide.set_column(at, "labels", wide.column("labels").cast(pa.list_(pa.int64())))
    with pytest.raises(StateError, match="its files differ"):
        read(rewritten(stream(table, tmp_path), 1, wide), 0, 15, 1)


@pytest.mark.parametrize("rows", [26, 28])
def test_a_file_with_more_or_fewer_rows_than_were_published_is_refused(
    table: pa.Table, tmp_path: Path, rows: int
) -> None:
    with pytest.raises(StateError, match=rf"train-1\.parquet has {rows} rows, not 27"):
        read(rewritten(stream(table, tmp_path), 1, table.slice(13, rows)), 0, 15, 1)


def test_a_version_without_row_numbers_is_prepared_again(table: pa.Table, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"cannot be trained on.*has no row") as caught:
        read(stream(table.drop_columns(["row"]), tmp_path), 0, 15, 1)
    assert "prepare it again" in str(caught.value.hint)
