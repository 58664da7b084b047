"""The Serve application that all `serve` tests share, and what they ask it with. Nothing here is heavy to import."""

import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

from actors.registry.client import RegistryClient
from actors.registry.facts import Version, VersionFact
from cluster.models import obtain
from cluster.storage import Home
from deployments.config import ServeConfig
from tests.adapters import write_adapter

BASE = "smollm2-135m-instruct"
TINY = "tiny-words"
"""A second base beside it: quick, and so sure of its words that no batch changes one."""
EMBEDDER = "all-minilm-l6-v2"
OUR_EMBEDDER = "tiny-embedder"
"""A registered one beside it, untrained, of 32 dimensions."""
RERANKER = "tiny-reranker"
"""Untrained: it has scores, and they mean nothing."""
MAX_MODEL_LEN = 512
MAX_LORA_RANK = 16
KEPT = "kept"
"""The adapter of `llm.keep`; nothing bears the name until a test registers it."""
ANSWER_WAIT_S = 120.0
BODY_TIMEOUT_S = 4.0
"""Long for a small body on a busy machine, short for a test that waits for it."""


@dataclass(frozen=True)
class ServeApp:
    """The running application and its clients."""

    url: str
    config: ServeConfig
    home: Home
    registry: RegistryClient
    http: httpx.Client = field(repr=False)
    sdk: openai.OpenAI = field(repr=False)

    def register(self, name: str, *, seed: int, rank: int = 8, base: str = BASE) -> Version:
        """A new version of `name` whose answers differ from the base's and from those of other seeds."""
        (like,) = (engine.model for engine in self.config.llm if engine.served_as == base)
        with tempfile.TemporaryDirectory() as scratch:
            folder = write_adapter(Path(scratch) / "adapter", obtain(like, self.home).path, seed=seed, rank=rank)
            return self.registry.register(VersionFact(name=name, kind="adapter", source_path=folder, base=base))

    def say(self, model: str, question: str = "What is the capital of France?", **settings: Any) -> str:
        """The answer of `model`, greedy and short."""
        asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, **settings}
        answer = self.sdk.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question}], **asked
        )
        return str(answer.choices[0].message.content)


@contextmanager
def running(home: Home, registry: RegistryClient) -> Iterator[ServeApp]:
    """The application on a free port of this machine, stopped at the end."""
    # Heavy: they bring torch and vLLM's configuration into the driver.
    from app.pipelines.serve import resolved
    from deployments import application
    from tests.bases import write_base
    from tests.embedders import write_cross_encoder, write_embedder

    tiny = home.root / "bases" / TINY
    if not tiny.is_dir():
        write_base(tiny, obtain(BASE, home).path, seed=1)
    reranker = home.root / "bases" / RERANKER
    if not reranker.is_dir():
        write_cross_encoder(reranker)
    prompts = {"query": "query : ", "document": "passage : "}
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_embedder(Path(scratch) / OUR_EMBEDDER, prompts=prompts, matryoshka=[8])
        fact = VersionFact(name=OUR_EMBEDDER, kind="embedder", source_path=folder, base=EMBEDDER)
        embedder = registry.register(fact).id
    config = ServeConfig.model_validate(
        {
            "gateway": {
                "port": _free_port(),
                "max_request_bytes": 1 << 20,
                "body_timeout_s": BODY_TIMEOUT_S,
                "require_keys": False,
            },
            "llm": [
                {
                    "model": BASE,
                    "max_model_len": MAX_MODEL_LEN,
                    "max_lora_rank": MAX_LORA_RANK,
                    "keep": [KEPT],
                    "tool_parser": "hermes",
                },
                {"model": str(tiny), "max_model_len": MAX_MODEL_LEN, "dtype": "float32", "max_adapters": 4},
            ],
            "embedding": [{"model": EMBEDDER}, {"model": embedder}],
            "reranking": {"model": str(reranker)},
        }
    )
    config = resolved(config, home)
    url = application.run(config)
    try:
        with httpx.Client(base_url=url, timeout=ANSWER_WAIT_S) as http:
            sdk = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=ANSWER_WAIT_S)
            yield ServeApp(url, config, home, registry, http, sdk)
    finally:
        application.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
