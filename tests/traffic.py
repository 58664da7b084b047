"""Requests that flow while a test does something to the application, and what came of each."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from tests.serving import BASE, ServeApp

SHORT: dict[str, Any] = {"model": BASE, "prompt": "Hello", "max_tokens": 2, "temperature": 0}


@dataclass
class Traffic:
    """Short requests and long streams, one after another."""

    app: ServeApp
    began: float = field(default_factory=time.monotonic)
    answered: int = 0
    whole: int = 0
    """Streams that have ended with their last token."""
    failed: list[tuple[float, str]] = field(default_factory=list)
    """When, in seconds, and how."""
    _over: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> None:
        with httpx.Client(base_url=self.app.url, timeout=60) as http:
            while not self._over.is_set():
                try:
                    response = http.post("/v1/completions", json=SHORT)
                except httpx.HTTPError as error:
                    self._fail(repr(error))
                    continue
                if response.is_success:
                    self.answered += 1
                else:
                    self._fail(f"{response.status_code}: {response.text}")
                time.sleep(0.1)

    def tell(self, tokens: int) -> None:
        while not self._over.is_set():
            try:
                self.whole += story(self.app, tokens)
            except openai.OpenAIError as error:
                self._fail(repr(error))
                time.sleep(0.2)

    def _fail(self, how: str) -> None:
        self.failed.append((round(time.monotonic() - self.began, 1), how))


def story(app: ServeApp, tokens: int) -> bool:
    """A stream to its end; whether all of it came. Raises what the SDK raises on an error event."""
    came, finish = 0, None
    stream = app.sdk.chat.completions.create(
        model=BASE,
        messages=[{"role": "user", "content": "Tell a long story."}],
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    for chunk in stream:
        came = chunk.usage.completion_tokens if chunk.usage else came
        finish = chunk.choices[0].finish_reason or finish if chunk.choices else finish
    return (came, finish) == (tokens, "length")


@contextmanager
def flowing(app: ServeApp, *, asking: int = 1, telling: int = 1, tokens: int = 150) -> Iterator[Traffic]:
    """Traffic for as long as the block runs; what is on its way at the end is waited for."""
    traffic = Traffic(app)
    threads = [threading.Thread(target=traffic.ask) for _ in range(asking)]
    threads += [threading.Thread(target=traffic.tell, args=(tokens,)) for _ in range(telling)]
    for thread in threads:
        thread.start()
    try:
        yield traffic
    finally:
        traffic._over.set()
        for thread in threads:
            thread.join()
