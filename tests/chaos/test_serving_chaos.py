"""What a client sees when the engine or its replica is killed in mid-stream: an error event, a 503, then answers."""

import os
import signal
import time
from typing import Any

import httpx
import openai
import psutil
import pytest

from cluster import environment
from tests.serving import BASE, ServeApp

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

NOTICED_S = 2.0
BACK_S = 150.0
LONG: dict[str, Any] = {
    "model": BASE,
    "messages": [{"role": "user", "content": "Tell a long story."}],
    "max_tokens": 450,
    "extra_body": {"ignore_eos": True},
}
PARTS = {"engine": "VLLM::EngineCore", "replica": "ray::ServeReplica:flywheel:llm"}


def pid_of(part: str, app: ServeApp) -> int:
    """The one process of the application that is this part."""
    found = [
        process.pid
        for process in psutil.process_iter()
        if " ".join(process.cmdline()).startswith(PARTS[part])
        and process.environ().get(environment.HOME) == str(app.home.root)
    ]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("part", PARTS)
def test_a_kill_in_mid_stream_is_told_and_mended(serve_app: ServeApp, part: str) -> None:
    stream = serve_app.sdk.chat.completions.create(**LONG, stream=True)
    for _ in range(3):
        next(stream)
    victim = pid_of(part, serve_app)
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(openai.APIError) as caught:
        list(stream)
    assert time.monotonic() - killed < NOTICED_S
    assert caught.value.code == "overloaded"

    statuses: list[tuple[float, int]] = []
    refused: httpx.Response | None = None
    while time.monotonic() - killed < BACK_S:
        asked = {"model": BASE, "prompt": "Hello", "max_tokens": 2}
        response = serve_app.http.post("/v1/completions", json=asked)
        statuses.append((round(time.monotonic() - killed, 1), response.status_code))
        if response.status_code == 200:
            break
        refused = response
        time.sleep(0.3)
    print(f"{part} killed; status by seconds since: {statuses}")  # noqa: T201 (what `make chaos` is run to see)
    assert statuses[-1][1] == 200
    assert {status for _, status in statuses[:-1]} == {503}  # never a 500, and never an answer from the dead
    assert refused is not None
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "overloaded"
    assert pid_of(part, serve_app) != victim
