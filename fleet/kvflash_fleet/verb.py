"""`kvflash-run store`: the store that servers of one model share. Needs no model and no native library."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from kvflash_ggml.cli.model import plain_errors
from kvflash_ggml.cli.report import row
from kvflash_ggml.cli.sections import HELP, json_option, prune_options
from kvflash_ggml.cli.terminal import size_text
from kvflash_ggml.errors import ConfigError

from . import tidy
from .objects import Objects, open_objects

DAY = 86400.0


@click.group(context_settings=HELP)
def store() -> None:
    """Look at, check and tidy up the store that `serve --store` writes."""


def _surveyed(url: str) -> tuple[Objects, list[tidy.ModelTexts]]:
    objects = open_objects(url, write=False)
    try:
        return objects, tidy.survey(objects)
    except OSError as err:
        raise ConfigError(f"{url} cannot be read: {err}") from err


@store.command(context_settings=HELP)
@click.argument("url")
@json_option("an object per conversation")
def ls(*, url: str, as_json: bool) -> None:
    """Say which conversations the store at URL has, by the model they are of."""
    with plain_errors(verbose=False):
        _, found = _surveyed(url)
    if as_json:
        click.echo(json.dumps([_facts(texts, state) for texts in found for state in texts.states]))
        return
    for texts in found:
        row("model", f"{texts.model}, {len(texts.states)} conversations, {size_text(texts.bytes)}")
        for state in sorted(texts.states, key=lambda state: state.object.modified):
            facts = _facts(texts, state)
            written = time.strftime("%Y-%m-%d %H:%M", time.localtime(facts["written"]))
            said = (
                facts["damaged"] or f"{facts['tokens']} tokens, {size_text(facts['bytes'])}, {written}, {facts['made']}"
            )
            row(facts["id"] or "?", said)


def _facts(texts: tidy.ModelTexts, state: tidy.State) -> dict[str, Any]:
    head = state.head
    return {
        "model": texts.model,
        "id": None if head is None else head.id,
        "tokens": None if head is None else len(head.tokens),
        "bytes": None if head is None else head.size,
        "made": None if head is None else head.made,
        "written": state.object.modified,
        "damaged": state.why or None,
    }


@store.command(context_settings=HELP)
@click.argument("url")
@click.pass_context
def verify(ctx: click.Context, *, url: str) -> None:
    """Read all of the store at URL and check every checksum.

    The exit code is 1 if something is damaged or missing. `store prune` removes damaged heads, and a
    server replaces a damaged block when it meets one.
    """
    failed = False
    with plain_errors(verbose=False):
        objects, found = _surveyed(url)
        for texts in found:
            for problem in tidy.problems(objects, texts):
                failed = True
                click.secho(f"Error: {problem}", err=True, fg="red")
            click.echo(f"{texts.model}: {len(texts.states)} conversations, {size_text(texts.bytes)}, read")
    ctx.exit(1 if failed else 0)


@store.command(context_settings=HELP)
@click.argument("url")
@prune_options("conversations")
def prune(*, url: str, older_than: float | None, larger_than: int | None, dry_run: bool) -> None:
    """Remove from the store at URL what nobody needs any more, and conversations by age or size.

    Servers may run meanwhile. Without options only damaged heads go, and what has been left over for
    an hour. Objects that no server has written are left alone.
    """
    with plain_errors(verbose=False):
        objects, found = _surveyed(url)
        seconds = None if older_than is None else older_than * DAY
        gone = tidy.removable(found, now=time.time(), older_than=seconds, larger_than=larger_than)
        for one in gone:
            if not dry_run:
                objects.delete(one.name)
            click.echo(f"{one.why:9}  {size_text(one.size):>10}  {one.name}")
    total = size_text(sum(one.size for one in gone))
    click.echo(f"{len(gone)} objects, {total} {'would be ' if dry_run else ''}removed", err=True)
