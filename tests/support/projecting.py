"""Projectors as a stranger may write them, and how each ends in a process of its own, with an image or a sound.

As a program it reads pairs of a model and a projector from stdin, and writes how each has ended.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvflash_ggml.convert import writer
from kvflash_ggml.convert.writer import Planned
from kvflash_ggml.gguf import reader, types
from kvflash_ggml.gguf.reader import Field

SECONDS = 60
"""Of the clock, for one projector on a busy machine; one takes 0.2."""


def changed(
    source: Path,
    out: Path,
    *,
    without: str = "",
    kinds: Mapping[str, str] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    fields: Mapping[str, Any] | None = None,
) -> Path:
    """A projector without a tensor, or with tensors of zeros that have another type or shape, or with other fields."""
    file, kinds, shapes = reader.read(source), kinds or {}, shapes or {}
    head = {**file.fields, **{name: Field.of(name, value) for name, value in (fields or {}).items()}}
    planned = []
    for name, tensor in file.tensors.items():
        kind, shape = types.BY_NAME[kinds.get(name, tensor.kind.name)], shapes.get(name, tensor.shape)
        pieces = [*file.pieces(tensor)]
        if (kind, shape) != (tensor.kind, tensor.shape):
            pieces = [np.zeros(types.nbytes(kind, shape), np.uint8)]
        if name != without:
            planned.append(Planned(name=name, kind=kind, shape=shape, pieces=lambda pieces=pieces: iter(pieces)))
    with out.open("wb") as made:
        writer.write(made, list(head.values()), planned, lambda done, total: None)
    return out


def ends(model: Path, projectors: Iterable[Path], pixels: tuple[int, int] | None) -> list[str]:
    """How each has ended: "answered", the name and the text of an error, or the number of a signal.

    pixels: of the image; None: a sound is sent.
    """
    asked = json.dumps([str(model), [str(path) for path in projectors], pixels])
    folder = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}
    line = [sys.executable, "-m", "support.projecting"]
    done = subprocess.run(line, input=asked, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    told: list[str] = json.loads(done.stdout.splitlines()[-1])
    return told


def _ask(model: str, projector: str, pixels: list[int] | None) -> str:
    """Open a projector and ask about an image or a sound. After an error of the image, a text must be answered."""
    from kvflash_ggml import Llama
    from kvflash_ggml.errors import KVFlashError

    from .sounds import wav
    from .vision import png

    part: dict[str, Any]
    if pixels is None:
        part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav(5)).decode(), "format": "wav"}}
    else:
        part = {"type": "image_url", "image_url": {"url": png((250, 20, 20), (pixels[0], pixels[1]))}}
    settings: dict[str, Any] = {"n_ctx": 1024, "n_batch": 160, "n_ubatch": 160, "n_threads": 1, "n_threads_batch": 1}
    try:
        llm = Llama(model, mmproj=projector, kvflash=1024, kvflash_calibrate=False, verbose=False, **settings)
    except KVFlashError as err:
        return f"{type(err).__name__}: {err}"
    try:
        llm.create_chat_completion([{"role": "user", "content": [part]}], max_tokens=1)
    except KVFlashError as err:
        llm.create_chat_completion([{"role": "user", "content": "Go on."}], max_tokens=1)
        return f"of the image, {type(err).__name__}: {err}"
    return "answered"


def _forked(*asked: Any) -> str:
    receives, sends = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(SECONDS)
            said = _ask(*asked)
        except BaseException as err:
            said = f"not typed, {type(err).__name__}: {err}"
        os.write(sends, said.encode()[:4096])
        os._exit(0)
    os.close(sends)
    with os.fdopen(receives, "rb") as pipe:
        text = pipe.read().decode()
    status = os.waitpid(child, 0)[1]
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else text


if __name__ == "__main__":
    import kvflash_ggml  # noqa: F401  # loaded once, and not in each fork

    model, projectors, pixels = json.loads(sys.stdin.read())
    print(json.dumps([_forked(model, projector, pixels) for projector in projectors]))
