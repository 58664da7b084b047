"""The benches of training: their arithmetic, and each of them once at a size that says nothing of speed."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from actors.training.batching import MicroBatch
from app.bench import checkpoint, three_ways, train
from app.bench.checkpoint import Round
from app.bench.report import Bar, Result
from app.bench.turns import Referee, Ticket, Turn
from cluster import environment
from cluster.progress import silent

WORDS = 128
TINY = train.Size(batch=2, length=24, example=8, steps=2, runs=2, threads=1)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer, which TRL does not do without."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=WORDS, tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny-llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {f"w{number}": number for number in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w2").save_pretrained(folder)
    return folder


def named(results: list[Result]) -> dict[str, float]:
    return {result.name: result.median for result in results}


def test_engines_are_compared_turn_by_turn() -> None:
    size = train.Size(batch=2, length=50)
    pairs = [
        (Turn(2, wall_s=1.0, cpu_s=2.0), Turn(2, wall_s=2.0, cpu_s=3.0)),
        (Turn(2, wall_s=10.0, cpu_s=2.0), Turn(2, wall_s=13.0, cpu_s=3.0)),  # somebody else was busy
        (Turn(2, wall_s=1.0, cpu_s=2.0), Turn(2, wall_s=1.2, cpu_s=3.0)),
    ]
    results, bar = train.compare_engines(size, pairs)
    found = named(results)
    assert found["engine: ours"] == 200.0
    assert found["engine: ours over trl"] == 1.3  # the median of ratios, not the ratio of medians
    assert found["engine: CPU of trl over ours"] == 1.5
    assert bar == Bar(name="engine: ours over trl", value=1.3, bar=1.3, direction="min", met=True)


def test_a_path_that_is_slower_than_the_bar_misses_it() -> None:
    results, bar = train.compare_path([(Turn(4, wall_s=2.2, cpu_s=2.0), Turn(4, wall_s=2.0, cpu_s=2.0))])
    assert named(results)["path: ray"] == 0.55
    assert (bar.value, bar.met) == (1.1, False)


def test_rows_are_full_of_examples_with_a_loss_on_their_ends() -> None:
    size = train.Size(length=64, example=16)
    rows = MicroBatch.from_arrow(train.packed(size, WORDS))
    assert rows.input_ids.shape == (64, 64)
    assert int(rows.input_ids.max()) < WORDS
    learned = rows.labels != -100
    assert torch.equal(rows.labels[learned], rows.input_ids[learned])
    assert learned[:, -1].all()
    assert not learned[rows.position_ids == 0].any()
    assert 0.3 < float(learned.float().mean()) < 0.45
    for row in rows.position_ids.tolist():
        lengths = train._lengths(row)
        assert sum(lengths) == 64
        assert [place for length in lengths for place in range(length)] == row


def test_the_slowest_rank_counts_in_a_checkpoint() -> None:
    quick = Round(copy=1.0, sync=10.0, stall=1.2, commit=9.0, alone=(1.0,), behind=(1.5,), copied_bytes=2**29)
    slow = Round(copy=2.0, sync=8.0, stall=2.5, commit=9.0, alone=(1.0,), behind=(2.0, 9.0, 2.0), copied_bytes=2**29)
    results, bar = checkpoint.compare("2 ranks", [[quick], [slow]])
    found = named(results)
    assert found["2 ranks: state"] == 1.0
    assert found["2 ranks: stall over copy"] == 1.25
    assert found["2 ranks: synchronous over stall"] == 4.0
    assert found["2 ranks: step behind over step alone"] == 2.0
    assert bar.met


def test_losses_are_as_far_apart_as_the_worst_step() -> None:
    assert three_ways.difference([[2.0, 1.0], [2.0, 1.1], [2.0, 1.05]]) == pytest.approx(0.1)


def _counting(ticket: Ticket) -> None:
    for number in range(100):
        ticket.mark(number)


def _failing(ticket: Ticket) -> None:
    ticket.mark()
    raise SystemExit(3)


@pytest.mark.integration
def test_a_competitor_steps_only_in_its_turn() -> None:
    with Referee() as referee:
        referee.admit("counting", _counting)
        assert referee.said["counting"] == 0
        turns = [referee.turn("counting", steps) for steps in (3, 1)]
        assert [(turn.steps, turn.said) for turn in turns] == [(3, 3), (1, 4)]


@pytest.mark.integration
def test_a_competitor_that_dies_is_missed() -> None:
    with Referee() as referee:
        referee.admit("failing", _failing)
        with pytest.raises(RuntimeError, match="failing"):
            referee.turn("failing", 1)


@pytest.mark.integration
def test_the_engine_beside_trl_learns_the_same(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.HOME, str(tmp_path))
    found = train.run(TINY, silent, base=str(tiny_model), contests=("engine",))
    results = named(list(found.results))
    assert results["engine: ours"] > 0
    # Adapters begin as nothing, so the first loss is the base's: on the same tokens, the same.
    assert results["engine: first losses differ by"] < 1e-3


@pytest.mark.integration
def test_the_path_through_ray_beside_a_bare_loop(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.HOME, str(tmp_path))
    found = train.run(TINY, silent, base=str(tiny_model), contests=("path",))
    assert [bar.name for bar in found.bars] == ["path: ray over bare"]


@pytest.mark.integration
def test_a_checkpoint_is_measured_on_two_ranks(tiny_model: Path) -> None:
    found = checkpoint.run(checkpoint.Size(length=16, steps=2, runs=2), silent, base=tiny_model, ranks=(2,))
    results = named(list(found.results))
    assert results["2 ranks: commit behind"] > 0
    assert [result.runs for result in found.results if result.name == "2 ranks: stall"] == [2]


@pytest.mark.integration
def test_torch_and_jax_have_the_same_losses() -> None:
    pytest.importorskip("jax")
    size = three_ways.Size(
        layers=2, width=16, heads=2, hidden=32, words=64, batch=2, length=8, losses=12, steps=2, runs=1, threads=1
    )
    found = three_ways.run(size, silent, ways=("torch", "jax"))
    [bar] = found.bars
    assert bar.met
