"""Finds the models of a folder: their names, their files, and what the heads of these say."""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from kvflash_ggml.errors import ConversionError
from kvflash_ggml.gguf import purpose, reader

_PART = re.compile(r"(.+)-([0-9]{5})-of-[0-9]{5}")


Purpose: TypeAlias = Literal["answer", "embed", "rank"]

_POOLED: Mapping[int, Purpose] = {1: "embed", 2: "embed", 3: "embed", 4: "rank"}
"""What models are for by their files' pooling type: the mean, the first or the last token, or a head that ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderModel:
    """A model of a folder. name: as requests call it. path: its first file. size: of that, in bytes.

    changed: when the file was written, in ns. projector: of its images; None for a model that reads text only.
    """

    name: str
    path: Path
    size: int
    changed: int
    projector: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a model's file says of itself. facts: as `Prompts.facts`, as far as a head tells. n_ctx: the trained
    length, 0 if it does not say. fills: whether it has marks of a gap. purpose: what it was trained for.
    """

    facts: Mapping[str, Any]
    n_ctx: int
    template: str
    fills: bool
    purpose: Purpose = "answer"


_UNKNOWN = Head(facts=MappingProxyType({}), n_ctx=0, template="", fills=False)


def models(folder: Path) -> dict[str, FolderModel]:
    """List the models in a folder by name: of a file its stem, of a folder with one model the folder's name.

    A folder with several has them as folder/stem. Parts of a split model are one. Projectors, drafters and hidden files
    are none, and neither is a name that is no Unicode text. A model's projector is mmproj-STEM.gguf beside it, or any
    mmproj*.gguf where the model has a folder of its own. OSError for a folder that cannot be read.
    """
    entries = sorted(folder.iterdir())
    found = {one.name: one for path in entries if (one := _model(path)) is not None}
    for inner in entries:
        if not inner.name.startswith(".") and inner.is_dir():
            try:
                inside = sorted(inner.iterdir())
            except OSError:  # as lost+found
                continue
            several = [one for path in inside if (one := _model(path)) is not None]
            projector = next((path for path in inside if path.match("mmproj*.gguf") and path.is_file()), None)
            alone = len(several) == 1 and inner.name not in found and _written(inner.name)
            for one in several:
                name = inner.name if alone else f"{inner.name}/{one.name}"
                if _written(name):
                    found[name] = replace(one, name=name, projector=one.projector or (projector if alone else None))
    return found


def _model(path: Path) -> FolderModel | None:
    name, part = path.stem, _PART.fullmatch(path.stem)
    if part is not None:
        name = part[1]
    hidden = path.name.startswith((".", "mmproj")) or (part is not None and int(part[2]) != 1)
    if path.suffix != ".gguf" or hidden or not _written(name):
        return None
    try:
        told = path.stat()
    except OSError:
        return None
    if not stat.S_ISREG(told.st_mode):
        return None
    beside = path.with_name(f"mmproj-{name}.gguf")
    projector = beside if beside.is_file() else None
    one = FolderModel(name=name, path=path, size=told.st_size, changed=told.st_mtime_ns, projector=projector)
    return one if _reads_alone(one) else None


def _written(name: str) -> bool:
    """Tell whether a file's name is a Unicode text."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


@lru_cache(256)
def _reads_alone(one: FolderModel) -> bool:
    return purpose.reads_alone(one.path)


@lru_cache(256)
def head(one: FolderModel) -> Head:
    """Read what the head of a model's file says; of a file that cannot be read, nothing."""
    try:
        file = reader.read(one.path)
        length, template = file.own("context_length", 0), file.get("tokenizer.chat_template")
        pooling = file.own("pooling_type")
        named = {"name": "general.name", "architecture": "general.architecture", "size_label": "general.size_label"}
        facts = {name: value for name, key in named.items() if isinstance(value := file.get(key), str)}
    except (ConversionError, OSError):
        return _UNKNOWN
    return Head(
        facts=MappingProxyType({**facts, "size": one.size}),
        n_ctx=length if isinstance(length, int) else 0,
        template=template if isinstance(template, str) else "",
        fills=file.get("tokenizer.ggml.fim_pre_token_id") is not None,
        purpose=_POOLED.get(pooling, "answer") if isinstance(pooling, int) else "answer",
    )
