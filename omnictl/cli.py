"""The command line: one Typer application, one small file a verb in `commands/`.

A command parses, calls one function and prints through `output`. Errors become exit codes here, once.
"""

from __future__ import annotations

import sys

import typer

from omnictl import output
from omnictl.commands import plan, recipes
from runtime.errors import OmniError

app = typer.Typer(
    name="omnictl",
    help="Serve omni-modality models with one command.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("plan")(plan.command)
app.add_typer(recipes.app, name="recipes")


def main() -> None:
    """Entry point of the `omnictl` script."""
    try:
        app()
    except OmniError as error:
        output.report_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
