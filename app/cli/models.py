"""`flywheel models`: what is registered, how it came to be, and which version an alias names."""

import typer

EXAMPLES = "Example: `flywheel models show error-triage@champion`"
cli = typer.Typer(help="Registered versions and their aliases.", no_args_is_help=True, epilog=EXAMPLES)
