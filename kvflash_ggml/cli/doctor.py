"""`kvflash-run doctor [MODEL]`: what is installed, and does it work."""

from __future__ import annotations

import json
from typing import Any

import click

from .checks import Check, a_step, examine

_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "error": ("ERROR", "red")}
_WIDTH = 18


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", required=False)
@click.option("--measure", is_flag=True, help="Also take a whole step: what does a driver take beyond what is counted?")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=300,
    show_default=True,
    metavar="SECONDS",
    help="How long the decode may take.",
)
@click.pass_context
def doctor(ctx: click.Context, *, model: str | None, measure: bool, as_json: bool, timeout: float) -> None:
    """Say what is installed and whether it works.

    Versions, library, devices, environment, and a tiny decode with MODEL (or the test model of a
    checkout, or one that is made for it) in a child process; and what of MODEL would go where.
    The exit code is 1 if something is wrong.
    """
    checks = examine(model, timeout=timeout)
    if measure:
        checks.append(a_step(model, timeout=timeout))
    healthy = all(check.status != "error" for check in checks)
    if as_json:
        click.echo(json.dumps(_document(checks, healthy), ensure_ascii=False, indent=2))
    else:
        for check in checks:
            _print(check)
        click.echo()
        click.echo("everything works" if healthy else "something is wrong: see ERROR above")
    ctx.exit(0 if healthy else 1)


def _print(check: Check) -> None:
    mark, colour = _MARKS[check.status]
    lines = check.detail.split("\n")
    click.echo(f"{check.name:{_WIDTH}} {click.style(f'{mark:8}', fg=colour)}{lines[0]}")
    for line in lines[1:]:
        click.echo(" " * (_WIDTH + 9) + line)
    if check.remedy:
        for line in check.remedy.split("\n"):
            click.echo(" " * (_WIDTH + 9) + click.style(f"-> {line}", bold=True))


def _document(checks: list[Check], healthy: bool) -> dict[str, Any]:
    return {
        "ok": healthy,
        "checks": {
            check.name: {
                "status": check.status,
                "detail": check.detail,
                **({"remedy": check.remedy} if check.remedy else {}),
                **check.data,
            }
            for check in checks
        },
    }
