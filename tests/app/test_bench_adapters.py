"""The benches of adapters and of settings without an engine: what is asked, what is merged, what is made of it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors

from app.bench import adapters, homes, settings
from app.bench.adapters import ALL, ONE, RESIDENT, Merged, Size, ways, zipf
from app.bench.load import Answer, Load
from app.bench.serve import Turn
from cluster.models import obtain
from cluster.storage import Home

NAMES = [f"base:a{number}" for number in range(64)]


def test_the_law_is_zipfs() -> None:
    shares = zipf(64, 1.0)
    assert sum(shares) == pytest.approx(1)
    assert shares[0] / shares[9] == pytest.approx(10)
    assert sum(shares[:8]) == pytest.approx(0.573, abs=0.001)


def test_ways_ask_the_same_of_others() -> None:
    size = Size(asks=40)
    asked = {name: way.requests(size, 7) for name, way in ways(NAMES, size).items()}
    assert len({tuple(ask.prompt for ask in asks) for asks in asked.values()}) == 1
    named = {name: [ask.model for ask in asks] for name, asks in asked.items()}
    assert set(named[ONE]) == {NAMES[0]}
    assert set(named[RESIDENT]) == set(NAMES[:8])
    assert len(set(named[ALL])) > 50
    # The most wanted has a fifth of the requests, by its share of 0.21.
    assert 0.17 < named[ALL].count(NAMES[0]) / len(named[ALL]) < 0.25


def load(wall_s: float, first_s: float = 0.1, fault: str | None = None) -> Load:
    good = [Answer(0.0, (first_s, first_s + 0.01), tokens=10)]
    return Load(wall_s, (*good, *([Answer(0.0, fault=fault)] if fault else [])))


def test_a_bar_is_one_of_turns_of_one_round() -> None:
    loads = {
        ONE: [load(1.0), load(4.0)],
        RESIDENT: [load(1.0), load(4.0)],
        ALL: [load(2.0), load(5.0, fault="HTTP 503")],
    }
    cold = {adapters.NEVER: [float(each) for each in range(1, 101)]}
    results, bars = adapters.figures(Size(), loads, cold, [Merged(30.0, 1.5), Merged(34.0, 1.7)])
    found = {result.name: result for result in results}
    assert found["output, all adapters over one adapter"].median == pytest.approx(0.65)
    assert found["output, resident adapters over one adapter"].median == 1.0
    assert found["first token, p99, never loaded before"].median == 99
    assert found["a merged model, until it answers"].median == 32.0
    assert found["requests for the 8 most wanted"].median == 0.5729
    assert {bar.name: bar.met for bar in bars} == {
        "output, all adapters over one adapter": False,
        "failed requests": False,
    }


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with one weight of each linear layer's shape."""
    folder = tmp_path / "base"
    folder.mkdir()
    config = {
        "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1,
        "num_hidden_layers": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    weights = {
        f"{name}.weight": torch.randn(shape).to(torch.bfloat16) for name, shape in adapters._linear(folder).items()
    }
    save_tensors({**weights, "model.norm.weight": torch.ones(8)}, folder / "model.safetensors")
    return folder


def test_a_merged_model_computes_what_base_and_adapter_compute(base: Path, tmp_path: Path) -> None:
    adapters.write_adapter(tmp_path / "a", base, seed=3)
    adapters.merge(base, tmp_path / "a", tmp_path / "merged")
    before, after = (load_tensors(folder / "model.safetensors") for folder in (base, tmp_path / "merged"))
    lora = load_file(tmp_path / "a" / "adapter_model.safetensors")
    declared = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    inputs = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    name = "model.layers.1.mlp.up_proj"
    up, down = (lora[f"base_model.model.{name}.lora_{each}.weight"] for each in "BA")
    scale = declared["lora_alpha"] / declared["r"]
    unmerged = inputs @ before[f"{name}.weight"].float().numpy().T + scale * (inputs @ down.T) @ up.T
    merged = inputs @ after[f"{name}.weight"].float().numpy().T
    np.testing.assert_allclose(merged, unmerged, atol=0.1)
    assert not torch.equal(before[f"{name}.weight"], after[f"{name}.weight"])
    assert torch.equal(before["model.norm.weight"], after["model.norm.weight"])
    assert (tmp_path / "merged" / "config.json").read_bytes() == (base / "config.json").read_bytes()


def test_a_setting_is_compared_with_the_turn_beside_it() -> None:
    def turn(wall_s: float) -> Turn:
        return Turn(load=load(wall_s), cpu_s=0.1, idle={}, others=0.0)

    pairs = [(turn(1.0), turn(2.0)), (turn(4.0), turn(4.0)), (turn(2.0), turn(3.0))]
    found = {r.name: r for r in settings.figures({8: {"2 threads": pairs}}, {"as served": 0.01, "float32": 0.001})}
    assert found["8 streams: output, 2 threads"].median == 1.5
    assert found["8 streams: output, as served"].median == pytest.approx(3.333)
    assert found["off the reference, float32"].median == 0.001


def test_what_a_bench_learns_of_a_model_stays_in_its_own_home(base: Path, tmp_path: Path) -> None:
    current = Home(tmp_path / "current")
    current.models.mkdir(parents=True)
    (current.models / "known").mkdir()
    (current.models / "known.json").write_text("{}")
    current.keys.mkdir()
    home = homes.beside(current, tmp_path / "scratch")
    assert (home.models / "known").is_dir()
    assert (home.models / "known.json").read_text() == "{}"
    (base / "tokenizer.json").write_text("{}")
    (base / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    obtain(str(base), home)
    assert any(path.name.startswith("path-") for path in home.models.iterdir())
    assert {path.name for path in current.models.iterdir()} == {"known", "known.json"}
