"""`omnictl doctor`: is this machine fit to serve, and if not, what to do."""

from __future__ import annotations

from typing import Annotated

import typer

from omnictl import output
from runtime.errors import EnvironmentProblem


def command(as_json: Annotated[bool, typer.Option("--json", help="Findings as one JSON document.")] = False) -> None:
    """Check if this machine is fit to serve.

    Looks at environment, machine, network, media, recipes and deployments. Exit code 5 when something fails.
    """
    from omnictl.doctor import Level, examine

    findings = examine()
    counts = {level: sum(f.level is level for f in findings) for level in Level}
    if as_json:
        summary = {level.lower(): count for level, count in counts.items()}
        output.print_json({"summary": summary, "findings": [f.to_document() for f in findings]})
    else:
        for group in dict.fromkeys(f.group for f in findings):
            rows = [(f.level, f.name, f.detail) for f in findings if f.group == group]
            output.print_table(("", group, ""), rows)
            for finding in findings:
                if finding.group == group and finding.remedy:
                    output.write(f"      {finding.name}: {finding.remedy}\n")
        output.write(f"\n{counts[Level.OK]} OK, {counts[Level.WARN]} WARN, {counts[Level.FAIL]} FAIL\n")
    if counts[Level.FAIL]:
        raise typer.Exit(EnvironmentProblem.exit_code)
