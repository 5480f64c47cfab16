"""The command line: one Typer application, one small file a verb in `commands/`.

A command parses, calls one function and prints through `output`. Errors become exit codes here, once.
"""

from __future__ import annotations

import os
import sys

import typer

from omnictl import output
from omnictl.commands import chat, doctor, down, logs, plan, ps, pull, recipes, trace, up, version
from runtime.errors import OmniError

TRACEBACK_VARIABLE = "OMNICTL_TRACEBACK"

app = typer.Typer(
    name="omnictl",
    help="Serve omni-modality models with one command.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("up")(up.command)
app.command("ps")(ps.command)
app.command("logs")(logs.command)
app.command("down")(down.command)
app.command("chat")(chat.command)
app.command("trace")(trace.command)
app.command("pull")(pull.command)
app.command("plan")(plan.command)
app.add_typer(recipes.app, name="recipes")
app.command("doctor")(doctor.command)
app.command("version")(version.command)


def main() -> None:
    """Run the command line. Called by `omnictl.__main__`."""
    try:
        app()
    except OmniError as error:
        output.report_error(error)
        sys.exit(error.exit_code)
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        output.note(f"error: {type(error).__name__}: {error}")
        output.note(f"hint: this is a fault of omnictl; {TRACEBACK_VARIABLE}=1 shows where it is")
        sys.exit(OmniError.exit_code)
