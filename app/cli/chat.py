"""`flywheel chat`: talk to a served model or adapter, streaming."""

import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from app.cli.connection import Key, Url, api_key, gateway_url
from app.cli.output import AsJson, notes, show
from app.pipelines.gateway import not_the_gateway, unreachable
from cluster.errors import ConfigError, RequestError

EXAMPLES = 'Example: `flywheel chat smollm2-135m-instruct:error-triage@champion "division by zero"`'


def run(
    model: Annotated[str, typer.Argument(help="Model name, or base:adapter, base:adapter@alias, base:adapter/3.")],
    message: Annotated[str | None, typer.Argument(help="One message; without it, a conversation is read.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.0,
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Ask a model once, or hold a conversation when no message is given (an empty line ends it)."""
    if message is None and as_json:
        raise ConfigError("A conversation is not one JSON object.", hint="Give a message, or leave out --json.")
    if message is None and sys.stdin is None:
        raise ConfigError("There is no stdin to read a conversation from.", hint="Give a message.")
    address, secret = gateway_url(url), api_key(key)
    import openai  # takes most of a second to import

    client = openai.OpenAI(base_url=f"{address}/v1", api_key=secret or "none", max_retries=0, timeout=300)
    conversation: list[Any] = [{"role": "system", "content": system}] if system else []

    def ask(text: str) -> str:
        conversation.append({"role": "user", "content": text})
        try:
            stream: Any = client.chat.completions.create(
                model=model,
                messages=conversation,
                max_tokens=max_tokens,
                temperature=temperature,
                stream=True,
            )
            pieces = []
            answered = False
            for event in stream:
                answered = answered or bool(event.choices)
                piece = (event.choices[0].delta.content or "") if event.choices else ""
                pieces.append(piece)
                if not as_json:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
        except openai.APIConnectionError as error:
            raise unreachable(address, error.message) from None
        except openai.APIError as error:
            raise RequestError(error.message, hint="`flywheel models list` names what is served.") from None
        except (ValueError, TypeError, AttributeError):  # a stream of something else than completions
            raise not_the_gateway(address) from None
        if not answered:  # an empty answer would still have come as a choice
            raise not_the_gateway(address)
        if not as_json:
            sys.stdout.write("\n")
        conversation.append({"role": "assistant", "content": "".join(pieces)})
        return "".join(pieces)

    if message is not None:
        answer = ask(message)
        show({"model": model, "answer": answer}, _nothing, as_json=as_json)
        return
    while True:
        notes.print("you: ", style="bold", end="")
        text = sys.stdin.readline().strip()
        if not text:
            return
        ask(text)


def _nothing(_console: Console) -> None:
    """The answer was shown while it streamed."""
