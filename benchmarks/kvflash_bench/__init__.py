"""`kvflash-bench`: every figure of docs/benchmarks.md comes from here. The last line of stdout is one JSON document."""

from __future__ import annotations

import click

from .conversing import agent, conversations
from .relevance import loss, reading, recall, scores
from .servers import overload, server, soak
from .speed import depth, paging, random_model, restore, scoring, streaming
from .verifying import acceptance, drafters, spec


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure the paged engine. Ratios within one run are what counts; absolute figures belong to one machine."""


_SPEED = (depth, paging, scoring, random_model, restore, streaming, spec, drafters, acceptance)
_RELEVANCE = (recall, scores, reading, loss)
for verb in (*_SPEED, *_RELEVANCE, conversations, agent, server, soak, overload):
    main.add_command(verb)
