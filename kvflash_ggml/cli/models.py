"""`kvflash-run pull`, `list` and `rm`: models of a hub, in the cache folder that other programs share."""

from __future__ import annotations

from pathlib import Path

import click

from . import hub
from .model import plain_errors
from .report import say
from .sections import HELP, Written, json_option
from .terminal import size_text

_model = click.argument("model", type=Written(hub.hub_model), metavar="OWNER/REPO[:QUANT]")


@click.command(context_settings=HELP)
@_model
@click.option("-q", "--quiet", is_flag=True, help="Nothing but errors on stderr.")
def pull(*, model: hub.HubModel, quiet: bool) -> None:
    """Fetch a model from a hub, and print its path.

    QUANT is a quantisation, as Q4_K_M, or the name of a file; without it Q4_K_M is taken, else Q8_0, else
    the first model. What was interrupted goes on where it stopped. HF_ENDPOINT, HF_TOKEN, HF_HOME and
    HF_HUB_OFFLINE mean what they mean to huggingface_hub, which this needs.
    """
    with plain_errors(verbose=False):
        click.echo(str(hub.fetch(model, quiet=quiet)))


@click.command("list", context_settings=HELP)
@json_option("an object per model")
def list_(*, as_json: bool) -> None:
    """List the .gguf files of hubs that are on this disk, whichever program has fetched them."""
    with plain_errors(verbose=False):
        found = [
            (name, sum(path.stat().st_size for path in paths), str(paths[0]))
            for repo in hub.repositories()
            for name, paths in hub.models_of(repo).items()
        ]
    lines = [f"{size_text(size):>10}  {name}" for name, size, _path in found]
    document = [{"model": name, "bytes": size, "path": path} for name, size, path in found]
    say(
        lines or [f"nothing is in {hub.cache_dir()}: kvflash-run pull OWNER/REPO fetches a model"],
        document,
        as_json=as_json,
    )


@click.command(context_settings=HELP)
@_model
def rm(*, model: hub.HubModel) -> None:
    """Remove a model from the disk, or every .gguf file of its repository.

    Other programs that use the same cache folder lose the files too.
    """
    with plain_errors(verbose=False):
        for path in hub.remove(model):
            click.echo(f"removed {click.format_filename(Path(path).name)}", err=True)
