"""`kvflash-convert`: GGUF files of drafters and models. Needs no native library but where a verb says so."""

from __future__ import annotations

import click

from .convert_bind import bind
from .convert_draft import draft
from .convert_inspect import inspect
from .convert_migrate import migrate
from .convert_model import model
from .convert_quantize import quantize
from .convert_verify import verify
from .main import Verbs


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
def convert() -> None:
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


for command in (draft, quantize, verify, bind, migrate, inspect, model):
    convert.add_command(command)
