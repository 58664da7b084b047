"""The mends on the real vLLM, without an engine: that upstream still has its faults, and that they are gone."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.errors import DependencyError
from deployments.engine_plugin import mends

imports_vllm = pytest.mark.integration  # which takes seconds

RANK, FEATURES, BASE, ADAPTER = 4, 8, 0, 7


def wrapper(kind: type[Any], slots: list[int], *, tokens_per_request: int = 1) -> Any:
    """A wrapper of `kind` for a prefill of requests to the base (0) and to adapters 7 and 8 in both slots."""
    from vllm.lora.layers import LoRAMapping

    made = kind(64, 16, "cpu")
    mapping = LoRAMapping([slot for slot in slots for _ in range(tokens_per_request)], slots, is_prefill=True)
    made.update_metadata(mapping, [7, 8], 3, 100)
    return made


def linear(kind: type[Any], slots: list[int]) -> torch.Tensor:
    """What one linear layer adds to zeros for one token per request."""
    torch.manual_seed(0)
    out = torch.zeros(len(slots), FEATURES)
    down, up = torch.randn(2, 1, RANK, FEATURES), torch.randn(2, 1, FEATURES, RANK)
    wrapper(kind, slots).add_lora_linear(out, torch.ones(len(slots), FEATURES), (down,), (up,), 1.0, (FEATURES,))
    return out


def upstream() -> type[Any]:
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    return PunicaWrapperCPU


def ours() -> type[Any]:
    from deployments.engine_plugin.punica import StackedPunicaWrapper

    return StackedPunicaWrapper


@imports_vllm
def test_upstream_still_answers_the_base_with_an_adapter() -> None:
    """When this fails, vLLM has mended it: delete the second mend (see mends.py)."""
    assert linear(upstream(), [BASE, ADAPTER])[0].abs().max() > 0


@imports_vllm
def test_the_base_is_left_alone_beside_an_adapter() -> None:
    added = linear(ours(), [BASE, ADAPTER, BASE, 8])
    assert added[[0, 2]].abs().max() == 0
    torch.testing.assert_close(added[[1, 3]], linear(upstream(), [ADAPTER, 8]))


@imports_vllm
def test_a_batch_of_only_base_requests_adds_nothing() -> None:
    assert linear(ours(), [BASE, BASE]).abs().max() == 0


def prompt_logprobs(kind: type[Any]) -> torch.Tensor:
    """lm_head for `prompt_logprobs`: five rows of one request's prompt, while two requests are sampled."""
    logits = torch.zeros(5, 100)
    down, up = torch.zeros(2, 1, RANK, FEATURES), torch.zeros(2, 1, 100, RANK)
    wrapper(kind, [BASE, ADAPTER], tokens_per_request=5).add_lora_logits(logits, torch.ones(5, FEATURES), down, up, 1.0)
    return logits


@imports_vllm
def test_upstream_still_dies_of_prompt_logprobs() -> None:
    """When this fails, vLLM has mended it: see the third fault in mends.py."""
    with pytest.raises(RuntimeError, match="einsum"):
        prompt_logprobs(upstream())


@imports_vllm
def test_prompt_logprobs_of_an_engine_with_adapters_work() -> None:
    assert prompt_logprobs(ours()).abs().max() == 0


def backend(kernel: str) -> SimpleNamespace:
    return SimpleNamespace(__name__="cpu_attn", _get_attn_isa=lambda *_args, **_kwargs: kernel)


@pytest.mark.parametrize(("chosen", "used"), [("amx", "vec"), ("vec", "vec"), ("vec16", "vec16"), ("neon", "neon")])
def test_only_amx_is_replaced(chosen: str, used: str) -> None:
    cpu_attn = backend(chosen)
    mends.choose_vec_over_amx(cpu_attn)
    mends.choose_vec_over_amx(cpu_attn)
    assert cpu_attn._get_attn_isa(torch.bfloat16, 128, head_size=64) == used


def test_a_vllm_without_the_patched_place_is_refused_with_its_name() -> None:
    with pytest.raises(DependencyError, match="cpu_attn has no _get_attn_isa"):
        mends.choose_vec_over_amx(SimpleNamespace(__name__="cpu_attn"))


def test_a_platform_that_computes_lora_otherwise_is_refused() -> None:
    class Platform:
        @classmethod
        def get_punica_wrapper(cls) -> str:
            return "vllm.lora.new.Wrapper"

    with pytest.raises(DependencyError, match=r"vllm\.lora\.new\.Wrapper"):
        mends.stack_adapters(Platform)


def run(code: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "VLLM_PLUGINS"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120, env=environment
    ).stdout


def test_importing_the_entry_point_imports_neither_torch_nor_vllm() -> None:
    assert run("import sys, deployments.engine_plugin; print({'torch', 'vllm'} & set(sys.modules))").strip() == "set()"


@imports_vllm
def test_vllm_itself_finds_and_applies_the_mends() -> None:
    """Through the installed entry point, as in every process of an engine; twice, as vLLM may do."""
    told = run(
        "from vllm.plugins import load_general_plugins\n"
        "import vllm.plugins\n"
        "load_general_plugins(); vllm.plugins.plugins_loaded = False; load_general_plugins()\n"
        "from vllm.platforms import current_platform\n"
        "import torch, vllm.v1.attention.backends.cpu_attn as cpu_attn\n"
        "print(current_platform.get_punica_wrapper(), cpu_attn._get_attn_isa(torch.bfloat16, 128, 64))\n"
    )
    assert told.split()[-2:] == [mends.PUNICA_CLASS, "vec"]
