"""`flywheel serve`: bring a recipe's application up."""

import signal
from contextlib import ExitStack
from typing import Annotated

import typer
import yaml
from rich.console import Console

from actors.registry.reader import read_state
from app import recipe as recipes
from app.cli.output import AsJson, Assignments, notes, show
from app.display import Display
from app.session import connected
from cluster.errors import ConfigError
from cluster.session import Beacon
from cluster.storage import Home
from cluster.telemetry import quiet_imports
from deployments.config import ServeConfig

EXAMPLES = "Examples: `flywheel serve error-triage` · `flywheel serve error-triage --print-config > serve.yaml`"


def run(
    recipe: Annotated[str, typer.Argument(help="Recipe: a path or a shipped name.")],
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the config that `serve deploy` takes, and exit.")
    ] = False,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Serve until Ctrl-C; on a Ray cluster that runs already, deploy and return."""
    settings = recipes.load(recipe, assignments or ()).serve
    if settings is None:
        raise ConfigError(f"The recipe {recipe!r} has no `serve` section.", hint="Add `serve: {llm: {model: …}}`.")
    home = Home.current()
    with quiet_imports(home):
        from app.pipelines import serve  # imports ray and vllm
        from deployments.application import deploy_config

    settings = serve.resolved(settings, home)  # a version that cannot be served is refused before anything starts
    if print_config:
        deployed = deploy_config(settings)
        show(deployed, lambda to: _write(to, yaml.safe_dump(deployed, sort_keys=False)), as_json=as_json)
        return
    with Display(notes) as display, connected() as session, ExitStack() as up:
        with display.stage("serve"):
            if session.owned:
                url = up.enter_context(serve.running(settings, home, display))
            else:
                url = serve.deploy(settings, home, display)
        if not session.owned:
            _tell(url, "It stays up; `serve shutdown` ends it.", as_json=as_json)
            _mind_keys(settings, home)
            return
        with Beacon.lit(home, address=session.address, gateway_url=url, dashboard_url=session.dashboard_url):
            _tell(url, "Press Ctrl-C to stop it.", as_json=as_json)
            _mind_keys(settings, home)
            signal.pause()


def _mind_keys(settings: ServeConfig, home: Home) -> None:
    """Said while somebody looks: without a key, whoever asks gets 401."""
    if settings.gateway.require_keys and not read_state(home).live_keys:
        notes.print("Nobody has an API key for it yet: `flywheel keys create NAME` makes one.")


def _write(to: Console, text: str) -> None:
    to.file.write(text)  # as it is: a console would fold long lines


def _tell(url: str, how_to_stop: str, *, as_json: bool) -> None:
    def render(to: Console) -> None:
        to.print(f"Serving at {url}. {how_to_stop}")

    show({"url": url}, render, as_json=as_json)
