"""Reads the prompt: from the command line, a file, or a pipe."""

from __future__ import annotations

import base64
import io
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import click

from ..errors import ConfigError
from ..media.files import is_sound
from .hub import HubModel
from .terminal import stdin_is_terminal

STDIN = Path("-")

MOST_TEXT = 64 << 20
"""Bytes of a text, about 16 million tokens. What has no end, as /dev/zero, would take all memory."""

MOST_MEDIA = 512 << 20
"""Bytes of an image or a sound; ten minutes of WAV have at most 460 million."""


_ENDS = re.compile("\r\n?")


def model_and_words(
    option: str | None, repository: HubModel | None, arguments: Sequence[str]
) -> tuple[str | HubModel, str | None]:
    """Return the model's path or hub name, and the prompt that was given as an argument.

    With `-m` or `-hf` the only argument is the prompt.
    """
    given = list(arguments)
    if option is not None and repository is not None:
        raise click.UsageError(f"the model is given twice, with -m {option} and -hf {repository}: leave one out")
    model = option if option is not None else repository or (given.pop(0) if given else None)
    if model is None:
        raise click.UsageError("which model? Give the path of a .gguf file, -m PATH, or -hf OWNER/REPO.")
    if len(given) > 1:
        raise click.UsageError(f"one prompt is expected, not {len(given)}: put it in quotes. Got: {' '.join(given)!r}")
    return model, given[0] if given else None


def read_prompt(words: str | None, prompt: str | None, files: Sequence[Path], *, use_stdin: bool) -> str | None:
    """Return files in their order or piped text, and then the prompt: documents, then a question. None for no text.

    words: the argument. A pipe is read for it, or when nothing else was given, or for `-f -`;
    `-p` and `-f FILE` leave stdin alone, so that a loop over lines of stdin keeps them.
    """
    if words is not None and prompt is not None:
        raise click.UsageError("the prompt is given twice: as an argument and with -p")
    question = as_typed(words if words is not None else prompt, "the prompt")
    document: str | None = None
    if files:
        if files.count(STDIN) > 1:
            raise click.UsageError(f"stdin is read once, not {files.count(STDIN)} times: give -f - once")
        document = _joined(_read_stdin() if file == STDIN else read_text(file) for file in files)
    elif use_stdin and prompt is None and not stdin_is_terminal():
        document = _read_stdin() or None
        if document is None and question is None:
            raise click.UsageError("no prompt: give one as an argument, with -p, -f, or on stdin")
    if document is None:
        text = question
    elif question is None:
        text = document.removesuffix("\n")
    else:
        text = _joined([document, question])
    if text is not None and not text.strip():
        raise click.UsageError("the prompt is empty")
    return text


def _joined(texts: Iterable[str]) -> str:
    """Join texts, so that each but the last ends its line."""
    *first, last = texts
    return "".join(text if text.endswith("\n") else f"{text}\n" for text in first) + last


def read_text(path: Path) -> str:
    """Read a file's text. ValueError if it is not UTF-8, or has more than MOST_TEXT bytes."""
    with path.open("rb") as file:
        return _text(file, str(path))


def _text(file: BinaryIO, name: str) -> str:
    try:
        return _ENDS.sub("\n", _bounded(file, name, MOST_TEXT).decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text (byte {error.start})") from error


def _bounded(file: BinaryIO, name: str, most: int) -> bytes:
    data = file.read(most + 1)
    if len(data) > most:
        raise ConfigError(f"{name} has more than {most >> 20} MiB, and no more is read: give a smaller file")
    return data


def with_media(files: Sequence[Path], text: str) -> str | list[dict[str, Any]]:
    """Make the content of a message with images and sounds before its text. OSError for a file that cannot be read."""
    if not files:
        return text
    parts: list[dict[str, Any]] = []
    for file in files:
        with file.open("rb") as opened:
            data = _bounded(opened, str(file), MOST_MEDIA)
        coded = base64.b64encode(data).decode()
        if is_sound(data):
            parts.append({"type": "input_audio", "input_audio": {"data": coded}})
        else:
            parts.append({"type": "image_url", "image_url": {"url": f"data:image;base64,{coded}"}})
    return [*parts, {"type": "text", "text": text}]


def as_typed(words: str | None, what: str) -> str | None:
    """Read words of the command line as UTF-8, whatever the locale says. ValueError if they are not."""
    try:
        (words or "").encode()
    except UnicodeEncodeError:  # bytes that the locale has no letters for
        try:
            return os.fsencode(words or "").decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{what} is not UTF-8 text (byte {error.start})") from error
    return words


def _read_stdin() -> str:
    if sys.stdin is None:  # closed by the caller
        return ""
    if isinstance(sys.stdin, io.TextIOWrapper):  # as files are read, whatever the locale says
        return _text(sys.stdin.buffer, "stdin")
    return sys.stdin.read()
