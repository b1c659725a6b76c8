"""`kvflash-bench`: every figure of docs/benchmarks.md comes from here. The last line of stdout is one JSON document."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from . import plans, plans_texts
from .verb import verb

VERBS = (
    verb("depth", plans.Depth, "depth"),
    verb("busy", plans.Busy, "busy"),
    verb("paging", plans.Paging, "paging"),
    verb("scoring", plans.Scoring, "scoring", where=False),
    verb("restore", plans.Restore, "restore"),
    verb("streaming", plans.Streaming, "streaming"),
    verb("spec", plans.Spec, "spec"),
    verb("drafters", plans.Drafters, "drafting"),
    verb("acceptance", plans.Acceptance, "accepting"),
    verb("recall", plans_texts.Recall, "recall"),
    verb("ruler", plans_texts.Ruler, "ruler"),
    verb("explain", plans_texts.Explain, "explain"),
    verb("longbench", plans_texts.LongBench, "longbench"),
    verb("scores", plans_texts.Scores, "study"),
    verb("faults", plans_texts.Faults, "faults"),
    verb("doubts", plans_texts.Doubts, "doubts"),
    verb("reading", plans_texts.Reading, "reading"),
    verb("loss", plans_texts.Loss, "loss"),
    verb("conversations", plans_texts.Conversations, "conversing"),
    verb("agent", plans_texts.Agent, "agent"),
    verb("replay", plans_texts.Replay, "replay"),
    verb("server", plans_texts.Server, "servers", "speed"),
    verb("soak", plans_texts.Soak, "servers", "soak"),
    verb("seats", plans_texts.Seats, "seats"),
    verb("overload", plans_texts.Overload, "servers", "overload"),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, commands=VERBS)
def main() -> None:
    """Measure the paged engine. Ratios within one run are what counts; absolute figures belong to one machine."""


@main.command(name="random-model")
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--shape", default="27b", show_default=True, help="27b, 27b-attention, 35b-a3b, tiny or tiny-moe.")
@click.option("--vocab", type=click.IntRange(257, 1 << 20), help="Tokens of the vocabulary.  [default: the shape's]")
@click.option("--words", is_flag=True, help="With a made-up vocabulary: text goes in and out, as a server needs it.")
def random_model(path: Path, shape: str, vocab: int | None, words: bool) -> None:
    """Write a random-weight GGUF with the shape of a real hybrid model, for speed measurements.

    Such a model finds nothing, so a file beside it names as many retrieval heads as a real one has.
    """
    from .shapes import SHAPES, write, write_heads

    if shape not in SHAPES:
        raise click.BadParameter(f"{shape!r} is none of {', '.join(SHAPES)}", param_hint="--shape")
    one = SHAPES[shape] if vocab is None else replace(SHAPES[shape], vocab=vocab)
    write(path, one, words=words)
    heads = path.with_suffix(".heads.json")
    write_heads(heads, path, SHAPES[shape])
    click.echo(f"{path}: {path.stat().st_size / 2**30:.2f} GiB; heads for --heads in {heads}", err=True)
