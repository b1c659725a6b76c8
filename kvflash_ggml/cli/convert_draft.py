"""`kvflash-convert draft DIR`: a drafter's checkpoint as a GGUF file for one target."""

from __future__ import annotations

from pathlib import Path

import click

from ..convert import draft as plain
from ..convert import upstream
from .convert_options import FILE, FOLDER, HELP, quiet_option, rope_option, target_option, working
from .terminal import note, size_text


@click.command(context_settings=HELP)
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
