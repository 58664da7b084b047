"""The data stage on Ray: mined and user sources to examples to tokens."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from actors.data import build, examples, feed, installed, prepare, version
from actors.data.config import DataConfig, SourceConfig
from cluster import models
from cluster.errors import ConfigError
from cluster.progress import Progress
from cluster.session import Session
from cluster.storage import Home

pytestmark = pytest.mark.integration

PACKAGES = ("pydantic", "httpx", "yaml", "click", "packaging", "jinja2", "sqlalchemy", "requests", "attr", "networkx")


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> list[installed.SourceFile]:
    """A few packages instead of all, so that mining takes a second."""
    files = [file for file in installed.installed_files() if file.name.split("/")[0] in PACKAGES]
    monkeypatch.setattr(installed, "installed_files", lambda: files)
    return files


def test_mining_is_the_same_whatever_the_order_of_tasks(
    ray_session: Session, tmp_path: Path, few_files: list[installed.SourceFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DataConfig(train=SourceConfig(source="python-functions"))
    reports: list[Progress] = []
    first = build.build("python-functions", config, Home(tmp_path / "one"), reports.append)
    # Other task sizes end in another order.
    monkeypatch.setattr(build, "_FILES_PER_TASK", 37)
    second = build.build("python-functions", config, Home(tmp_path / "two"))
    assert first.digest == second.digest
    assert reports[-1].done == reports[-1].total == len(few_files)

    read = {split: examples.read(first, split, Home(tmp_path / "one")) for split in version.SPLITS}
    groups = {split: {row.group for row in rows} for split, rows in read.items()}
    assert not groups["train"] & groups["test"]
    assert len(read["test"]) >= 20
    origins = pq.read_table(first.shards("train", Home(tmp_path / "one"))[0]).column("origin").to_pylist()
    assert all(origin["version"] and origin["line"] > 0 for origin in origins)

    assert build.build("python-functions", config, Home(tmp_path / "one")) == first
    with pytest.raises(ConfigError, match="only chat examples"):
        prepare.prepare(first, config, tmp_path, Home(tmp_path / "one"))


def test_a_users_file_becomes_tokens_with_loss_on_the_answers(ray_session: Session, home: Home, tmp_path: Path) -> None:
    path = tmp_path / "my sums.jsonl"
    lines = [json.dumps({"prompt": f"What is {n} + {n}?", "completion": str(2 * n)}) for n in range(200)]
    lines.insert(7, "{")
    lines.append(json.dumps({"prompt": "Say a lot.", "completion": "a lot " * 200}))
    path.write_text("\n".join(lines))
    base = models.obtain("smollm2-135m-instruct", home)
    config = DataConfig(train=SourceConfig(source=str(path), limit=50), max_length=128)
    kept = Home(tmp_path / "home")

    made = build.build(str(path), config, kept)
    assert made.name == "my-sums"
    assert made.quarantined == {"malformed": 1}
    assert sum(split.rows for split in made.splits.values()) == 201

    ready = prepare.prepare(made, config, base.path, kept)
    assert prepare.prepare(made, config, base.path, kept) == ready
    assert (ready.stage, ready.parent, version.load(kept, "my-sums.tokens")) == ("tokens", made.id, ready)
    train = ready.splits["train"]
    long = sum(ready.quarantined.values())
    assert set(ready.quarantined) <= {"too-long"}
    assert (train.examples or 0) + (ready.splits["test"].examples or 0) + long == 50 + made.splits["test"].rows

    rows = feed.dataset(ready, "train", kept).take_all()
    wanted = {example.id for example in examples.read(made, "train", kept, limit=50)}
    packed = [sample for row in rows for sample in row["sample_ids"]]
    assert len(packed) == len(set(packed)) == train.examples
    assert set(packed) <= wanted
    assert {len(row[column]) for row in rows for column in ("input_ids", "labels", "position_ids")} == {128}

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base.path)
    by_id = {example.id: example for example in examples.read(made, "train", kept, limit=50)}
    for row in rows:
        learned = tokenizer.decode([token for token in row["labels"] if token != -100])
        assert learned == "".join(f"{by_id[sample].messages[-1]['content']}<|im_end|>" for sample in row["sample_ids"])

    few = feed.dataset(made, "train", kept, limit=9).take_all()
    assert sorted(row["id"] for row in few) == sorted(
        example.id for example in examples.read(made, "train", kept, limit=9)
    )


def test_a_source_that_is_not_there_names_what_was_meant(ray_session: Session, home: Home) -> None:
    config = DataConfig(train=SourceConfig(source="python-erors"))
    with pytest.raises(ConfigError) as caught:
        build.build("python-erors", config, home)
    assert "'python-errors'" in str(caught.value.hint)
