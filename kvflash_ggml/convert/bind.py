"""Writes into a drafter's file which model it was trained for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from ..files import replacing
from ..gguf import origin, reader, target, verify
from ..logs import Progress
from . import writer
from .writer import Planned


def bind(
    source: Path,
    out: Path,
    *,
    model: Path,
    rope_differs: bool = False,
    called: str | None = None,
    progress: Progress = lambda done, total: None,
) -> str:
    """Write the drafter `source` to `out` with the keys of the target `model`. Return in words what it is.

    Keys that it had are replaced; tensors stay as they are. called: what errors name the file. Raises ConversionError
    if the drafter does not fit the target's shape, ConfigError if `out` cannot be written.
    """
    writer.check_output(out, source, model)
    file, aim = reader.read(source, called=called), reader.read(model)
    file = replace(file, fields={name: field for name, field in file.fields.items() if name not in origin.KEYS})
    verify.check(file, aim, rope_differs=rope_differs)
    fields = [*file.fields.values(), *origin.fields(target.describe(aim))]
    tensors = [
        Planned(name=tensor.name, kind=tensor.kind, shape=tensor.shape, pieces=partial(file.pieces, tensor))
        for tensor in file.tensors.values()
    ]
    with replacing(out) as made:
        writer.write(made, fields, tensors, progress)
        made.flush()
        return verify.verify(
            Path(made.name), model=model, rope_differs=rope_differs, called=called or out.name, progress=progress
        )
