"""`kvflash-convert`: makes and checks GGUF files of drafters and models. Most verbs need no native library."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import click

from .. import logs
from ..convert import draft as plain
from ..convert import migrate as old
from ..convert import quantize as smaller
from ..convert import upstream, writer
from ..convert.describe import Description, describe
from ..errors import ConversionError, brief
from ..gguf import encoding
from ..gguf import verify as checks
from ..native import library
from ..settings import setting
from ..speculation import acceptance
from .child import run_child
from .main import Verbs
from .model import plain_errors
from .report import row, tell
from .sections import HELP, collected, json_option
from .terminal import Progress, busy, note, size_text, stderr_is_terminal, unwinding

_SECONDS = 3600
_TOLERATED = 0.05


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """What the target goes on with, and how far."""

    texts: tuple[TextIO, ...] = setting(
        click.File(encoding="utf-8"), "--text", default=(), many=True, metavar="FILE", variable="",
        help="What the target goes on with to measure; may be given several times.  [default: four short beginnings]",
    )  # fmt: skip
    tokens: int = setting(
        int, "-n", least=1, most=4096, default=acceptance.TOKENS, variable="", help="How far it goes on with each."
    )


measure_options = collected("measuring", MeasureOptions)


def check_library() -> None:
    """Raise LibraryError where nothing can be measured, before anything is written."""
    library.library_folder()


def measure(drafts: dict[str, Path], *, target: Path, measuring: MeasureOptions, quiet: bool) -> None:
    """Measure drafts of one drafter, by what they are called, and print a line for each; two are compared.

    Raises click.ClickException if the child fails, or the target accepts nothing of the first one.
    """
    request = {
        "target": str(target),
        "drafts": [str(path) for path in drafts.values()],
        "texts": [file.read() for file in measuring.texts] or acceptance.TEXTS,
        "tokens": measuring.tokens,
    }
    with plain_errors(verbose=False), busy("drafting", shown=stderr_is_terminal() and not quiet):
        found = _ask(request)
    for name, it in zip(drafts, found, strict=True):
        click.echo(f"{name:7}{it['accepted']:6.2f} of {it['block']} drafted tokens accepted, in {it['steps']} steps")
    _refuse_nothing(found[0], target, next(iter(drafts.values())))
    if len(found) == 2:
        _compare(*found)


def _ask(request: dict[str, Any]) -> list[dict[str, Any]]:
    child = run_child(json.dumps(request), timeout=_SECONDS, module="kvflash_ggml.speculation.acceptance")
    if child.failure:
        raise ConversionError(
            Path(request["target"]).name, "acceptance", found=child.failure, wanted="a measurement",
            remedy="Whether the files are sound says kvflash-convert verify.",
        )  # fmt: skip
    found: list[dict[str, Any]] = child.said["drafts"]
    return found


def _refuse_nothing(it: dict[str, Any], target: Path, draft: Path) -> None:
    """Raise click.ClickException where the figure that was printed is 0.00."""
    if round(it["accepted"], 2) > 0:
        return
    if not it["steps"]:
        raise click.ClickException(
            f"{draft.name} was not measured: every text ended within its first draft. Go on for more tokens: --tokens."
        )
    raise click.ClickException(
        f"{target.name} accepts 0.00 drafted tokens a step, measured in {it['steps']} steps: {draft.name} was trained "
        f"for another model, or the texts are of a kind that it does not know. Give its own target, or --text FILE."
    )


def _compare(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Print the tokens won a step: those accepted, and the target's own."""
    won = (1 + after["accepted"]) / (1 + before["accepted"]) - 1
    click.echo(f"tokens a step: {won:+.1%}")
    if won < -_TOLERATED:
        click.secho(f"warning: more than {_TOLERATED:.0%} is lost: a larger --type keeps more", err=True, fg="yellow")


FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(path_type=Path)

quiet_option = click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")

rope_option = click.option(
    "--rope-differs",
    is_flag=True,
    help="The drafter was trained with another RoPE base than its target's; otherwise that is refused.",
)


def target_option(help_text: str, *, required: bool = False) -> Callable[[Any], Any]:
    """Make the option --target: the GGUF file of the model that a drafter is for."""
    return click.option("--target", type=FILE, metavar="GGUF", required=required, help=help_text)


@contextmanager
def working(doing: str, *, quiet: bool) -> Iterator[logs.Progress]:
    """Show a progress line in MiB on a terminal's stderr while something is done; errors end with their message."""
    with plain_errors(verbose=False), Progress(shown=stderr_is_terminal() and not quiet, doing=doing, unit="MiB") as it:
        yield it.update


@click.group(cls=Verbs, context_settings=HELP)
@click.pass_context
def convert(ctx: click.Context) -> None:
    """Make GGUF files of drafters and models, and check them.

    \b
    kvflash-convert draft drafter/ --target model.gguf       a DFlash checkpoint, for this target
    kvflash-convert quantize drafter-f16.gguf drafter-q8_0.gguf --type q8_0 --target model.gguf
    kvflash-convert verify drafter.gguf --target model.gguf  does this drafter fit this target?
    kvflash-convert bind drafter.gguf bound.gguf --target model.gguf   which model it was trained for
    kvflash-convert migrate old.gguf new.gguf --target model.gguf
    kvflash-convert inspect model.gguf                       what is in a GGUF file
    kvflash-convert model checkpoint/ -o model.gguf          a whole model, by llama.cpp's own converter

    A file is written as a whole or not at all. What cannot work is refused with what was found, what was
    wanted, and what helps; the exit code is 1 then.
    """
    ctx.with_resource(unwinding())


@convert.command(context_settings=HELP)
@click.argument("folder", type=FOLDER, metavar="DIR")
@target_option(
    "The model that it drafts for: its tokenizer is taken, and everything is compared with it.", required=True
)
@click.option("-o", "--out", type=FILE, metavar="FILE", help="The file to write.  [default: DIR-TYPE.gguf]")
@click.option(
    "--type", "kind", type=click.Choice(plain.TYPES), default="f16", help="Of matrices; norms stay f32.  [default: f16]"
)
@click.option(
    "--own-head/--target-head",
    default=None,
    help="What becomes of embeddings and a head in the checkpoint: kept, or left to the target.",
)
@click.option(
    "--target-model-dir",
    type=FOLDER,
    metavar="DIR",
    help="The target's Hugging Face folder: llama.cpp's own converter makes the file, and it is checked afterwards."
    " For EAGLE3, DFlash2, DSpark; needs the extra [convert].",
)
@rope_option
@quiet_option
def draft(
    *,
    folder: Path,
    target: Path,
    out: Path | None,
    kind: str,
    own_head: bool | None,
    target_model_dir: Path | None,
    rope_differs: bool,
    quiet: bool,
) -> None:
    """Make a GGUF file of the drafter in DIR, which has config.json and .safetensors files.

    Plain DFlash needs neither torch nor the target's checkpoint. A drafter that cannot work with this
    target is refused: another vocabulary, another RoPE base, layers that the target does not have,
    tensors that are missing or unknown.
    """
    made = out or Path(f"{folder.resolve().name}-{kind}.gguf")
    with working(f"writing {made}", quiet=quiet) as progress:
        if target_model_dir is None:
            plain.convert(
                folder, made, model=target, kind=kind, own_head=own_head, rope_differs=rope_differs, progress=progress
            )
        else:
            words = upstream.convert_draft(
                folder,
                made,
                model=target,
                target_folder=target_model_dir,
                kind=kind,
                rope_differs=rope_differs,
                shown=not quiet,
            )
            if not quiet:
                note(words)
    if not quiet:
        note(f"written to {made}, {size_text(made.stat().st_size)}")


@convert.command(context_settings=HELP)
@click.argument("source", type=FILE, metavar="IN")
@click.argument("out", type=FILE, metavar="OUT")
@click.option(
    "--type",
    "kind",
    type=click.Choice(smaller.TYPES, case_sensitive=False),
    default="q8_0",
    help="Of the layers' matrices.  [default: q8_0]",
)
@target_option("Measure with this model how many drafted tokens it accepts, of IN and OUT. Needs the native library.")
@measure_options
@quiet_option
def quantize(
    *, source: Path, out: Path, kind: str, target: Path | None, measuring: MeasureOptions, quiet: bool
) -> None:
    """Make a drafter's file smaller.

    fc, embeddings, heads and codebooks keep eight bits or more, norms stay as they are, and so does
    every key. Types with a k are made by the native library, others without it.

    A drafter can lose more than its target by this, so give a --target and look.
    """
    encode = smaller.encode_natively if smaller.needs_library(kind) else encoding.encode
    with working(f"writing {out}", quiet=quiet) as progress:
        writer.check_output(out, target)
        if target is not None:
            check_library()
        smaller.quantize(source, out, kind=kind, encode=encode, progress=progress)
    if not quiet:
        note(f"written to {out}, {size_text(out.stat().st_size)} of {size_text(source.stat().st_size)}")
    if target is not None:
        measure({"before": source, "after": out}, target=target, measuring=measuring, quiet=quiet)


@convert.command(context_settings=HELP)
@click.argument("file", type=FILE, metavar="FILE")
@target_option("The model that it drafts for; without one the file is checked by itself.")
@rope_option
@click.option(
    "--measure",
    "measured",
    is_flag=True,
    help="Also how many drafted tokens --target accepts. Needs the native library.",
)
@measure_options
@quiet_option
def verify(
    *, file: Path, target: Path | None, rope_differs: bool, measured: bool, measuring: MeasureOptions, quiet: bool
) -> None:
    """Check a drafter's file: its keys, its tensors, every value, and whether it fits its target.

    The exit code is 1 if something is wrong, and the message says what was found, what was wanted, and
    what helps. A drafter that kvflash-convert has made or bound says which model it was trained for, and
    no other one fits. Of any other drafter only the shape is checked: --measure tells how many of its tokens
    --target accepts, and the exit code is 1 if it accepts none.
    """
    if measured and target is None:
        raise click.UsageError("--measure needs a --target, the model that accepts or not")
    with working(f"checking {file}", quiet=quiet) as progress:
        if measured:
            check_library()
        words = checks.verify(file, model=target, rope_differs=rope_differs, progress=progress)
    if measured and target is not None:
        measure({"draft": file}, target=target, measuring=measuring, quiet=quiet)
    if not quiet:
        click.echo(f"{click.format_filename(file)}: {words}")


@convert.command(context_settings=HELP)
@click.argument("source", type=FILE, metavar="IN")
@click.argument("out", type=FILE, metavar="OUT")
@target_option("The model that it was trained for.", required=True)
@rope_option
@quiet_option
def bind(*, source: Path, out: Path, target: Path, rope_differs: bool, quiet: bool) -> None:
    """Write into a drafter's file which model it was trained for.

    For drafters that other tools have made. The architecture and a signature of the embedding of --target
    become keys of the file, and whoever opens the drafter beside another model gets an error. Tensors stay
    as they are. Whether it was trained for --target is yours to know: verify --measure helps.
    """
    with working(f"writing {out}", quiet=quiet) as progress:
        words = writer.bind(source, out, model=target, rope_differs=rope_differs, progress=progress)
    if not quiet:
        note(f"{words}\nwritten to {out}, {size_text(out.stat().st_size)}")


@convert.command(context_settings=HELP)
@click.argument("source", type=FILE, metavar="IN")
@click.argument("out", type=FILE, metavar="OUT")
@target_option("The model that it drafts for: the result is compared with it, and gets its tokenizer if it has none.")
@rope_option
@quiet_option
def migrate(*, source: Path, out: Path, target: Path | None, rope_differs: bool, quiet: bool) -> None:
    """Give a drafter's file llama.cpp's names.

    For files whose architecture is dflash-draft, qwen35-dflash-draft or gemma4-dflash-draft. Values are
    copied as they are. A file without its target layers, as quantisers of that kind leave it, is refused.
    """
    with working(f"writing {out}", quiet=quiet) as progress:
        old.migrate(source, out, model=target, rope_differs=rope_differs, progress=progress)
    if not quiet:
        note(f"written to {out}, {size_text(out.stat().st_size)}")


@convert.command(context_settings=HELP)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@json_option("an object per file")
@click.pass_context
def inspect(ctx: click.Context, *, files: tuple[Path, ...], as_json: bool) -> None:
    """Say what a GGUF file is, from its head alone.

    Architecture, trained length, layers whose cache a pool pages, bytes of cache a token, retrieval heads
    if a calibration has found them, what a drafter says of its target, and whether there is a chat
    template. The exit code is 1 if a file is none or is damaged.
    """
    ctx.exit(0 if tell(files, describe, _rows, as_json=as_json) else 1)


def _rows(it: Description) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in it.types.items())
    row("model", f"{brief(it.architecture)}, {brief(it.name or 'without a name')}")
    row("file", f"{size_text(it.bytes)}, {it.parameters / 1e6:,.1f} M parameters in tensors of {kinds}")
    row("trained for", "a length that it does not say" if it.context is None else f"{it.context:,} tokens")
    row("vocabulary", "none" if it.vocab is None else f"{it.vocab:,} tokens")
    row("layers", _layers(it))
    if it.token_bytes is not None:
        row("cache", f"{it.token_bytes:,} bytes a token as f16, in the layers that a pool pages")
    if it.drafter is None:
        row("heads", _heads(it))
    else:
        row("drafter", ", ".join(f"{key} {brief(value)}" for key, value in it.drafter.items()))
    row("template", "a chat template" if it.template else "no chat template")


def _layers(it: Description) -> str:
    text = "?" if it.layers is None else f"{it.layers}"
    text += f", {it.attention} with attention"
    if it.pooled is None:
        text += f"; the file names a window of {it.window:,} tokens, and not the layers that have it"
    else:
        text += f", {it.pooled} of them grow with the text"
    return text + (f"; {it.nextn} more that predict further tokens" if it.nextn else "")


def _heads(it: Description) -> str:
    if it.heads is None:
        return "not calibrated yet: kvflash-run calibrate"
    if not it.heads:
        return "no head finds what a question asks for: all are asked"
    return ", ".join(f"{layer}.{head}" for layer, head in it.heads)


@convert.command(context_settings=HELP | {"ignore_unknown_options": True})
@click.argument("folder", type=FOLDER, metavar="DIR")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS]...")
@click.option("-o", "--out", type=FILE, metavar="FILE", help="The file to write.  [default: DIR-TYPE.gguf]")
@click.option(
    "--type",
    "kind",
    type=click.Choice(upstream.TYPES),
    default="auto",
    help="Of most tensors; auto is the 16-bit type that loses least.  [default: auto]",
)
@quiet_option
def model(*, folder: Path, arguments: tuple[str, ...], out: Path | None, kind: str, quiet: bool) -> None:
    """Make a GGUF file of the Hugging Face model in DIR.

    llama.cpp's own converter does it, of the release that this package is built from, in a process of its
    own. It needs torch and transformers, the extra "convert" of this package. ARGUMENTS are passed on to it,
    as in kvflash-convert model DIR -- --no-mtp. It may run code that lies in DIR: convert what you trust.
    """
    made = out or Path(f"{folder.resolve().name}-{kind}.gguf")
    with plain_errors(verbose=False):
        upstream.convert_model(folder, made, kind=kind, arguments=arguments, shown=not quiet)
    if not quiet:
        note(f"written to {made}, {size_text(made.stat().st_size)}")
