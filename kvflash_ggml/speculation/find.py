"""Finds the drafters of a model from the heads of files alone, before anything is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from ..config import DFLASH, EAGLE3, MTP, NGRAM, SIMPLE
from ..drafter.model import BOUND, FOLDERS
from ..errors import ConfigError, ConversionError
from ..gguf import heads, purpose, reader, verify
from ..gguf import target as target_facts
from ..gguf.reader import GGUF
from .base import Features

logger = logging.getLogger("kvflash_ggml")

_BY_ARCHITECTURE = {"dflash": DFLASH, "eagle3": EAGLE3}


@dataclass(frozen=True, slots=True)
class Found:
    """A drafter to open. type: by upstream's name. file: of the drafter; None for the text and for the target's own
    head.
    """

    type: str
    file: Path | None = None


def find(model: Path, types: Sequence[str] = (), draft: Path | None = None) -> list[Found]:
    """Return the drafters of a model, in the order to ask them.

    types: requested types by upstream's names, each once. Without any: the text itself, and then `draft`, or the head
    in the model's file, or the best drafter that fits among the files beside it, if any. draft: a drafter's file. A
    small model is taken only if it is named. Load the model with its head if that is found.

    ConfigError if a requested drafter is not there, ConversionError for a file that is not a drafter of the model.
    """
    search = _Search(model)
    kind = None if draft is None else search.kind(draft)
    if not types:
        best = Found(kind, draft) if kind is not None else search.best()
        return [Found(NGRAM)] if best is None else [Found(NGRAM), best]
    if kind is not None and kind not in types:
        raise ConfigError(
            f"{draft} is for {kind}, and {', '.join(types)} is asked for: name {kind} too, or another file"
        )
    return [Found(name, draft) if name == kind else search.one(name) for name in types]


class _Search:
    """A model, and the files beside it."""

    def __init__(self, model: Path) -> None:
        self._model = model

    def kind(self, draft: Path) -> str:
        """Return the type of a drafter's file. A file that is bound to a target is checked."""
        file = reader.read(draft)
        part = purpose.part(file)
        if part is not None and not part.drafts and file.get("general.architecture") not in BOUND:
            raise ConversionError(
                file.name, "the file", found=part.what, wanted=f"a drafter for {self._model.name}", remedy=part.use
            )
        found = kind_of(file)
        if found == SIMPLE:
            purpose.check_head(file)
        else:
            verify.check(file, self._target, rope_differs=True)
        return found

    def best(self) -> Found | None:
        """Return the head in the model's file, or the best file beside it that fits."""
        if self._own_head():
            return Found(MTP)
        fitting = list(self._fitting((DFLASH, EAGLE3, MTP), partial(logger.info, "passed over as a drafter: %s")))
        return min(fitting, key=_rank)[1] if fitting else None

    def one(self, name: str) -> Found:
        """Return a drafter of this type."""
        if name == NGRAM or (name == MTP and self._own_head()):
            return Found(name)
        refused: list[ConversionError] = []
        if name != SIMPLE:
            fitting = list(self._fitting((name,), refused.append))
            if fitting:
                return min(fitting, key=_rank)[1]
        if refused:
            raise refused[0]
        where = "a small model is taken only if it is named" if name == SIMPLE else f"none is beside {self._model.name}"
        raise ConfigError(f"{name} needs a file, and {where}: give its path as draft (--spec-draft-model)")

    def _fitting(
        self, types: Sequence[str], refused: Callable[[ConversionError], None]
    ) -> Iterator[tuple[GGUF, Found]]:
        """Yield the files beside the model that are drafters of it, of these types."""
        for path in self._beside():
            try:
                file = reader.read(path)
                if kind_of(file) in types:
                    yield file, Found(self.kind(path), path)
            except ConversionError as error:
                refused(error)

    def _beside(self) -> Iterator[Path]:
        """Yield files that may be bound to the model; files of heads have "mtp" in their names."""
        for folder in FOLDERS:
            for path in sorted((self._model.parent / folder).glob("*.gguf")):
                if not path.is_file() or path.samefile(self._model):
                    continue
                if "mtp" in path.name.lower() or reader.architecture(path) in BOUND:
                    yield path

    def _own_head(self) -> bool:
        file = self._target
        return file.architecture in heads.GRAPHS and heads.count(file) == 1

    @cached_property
    def _target(self) -> GGUF:
        """The model's file, read once: a large vocabulary takes time."""
        return reader.read(self._model)


def kind_of(file: GGUF) -> str:
    """Return the type of a file that may be bound to a target, before it is checked."""
    if file.architecture in _BY_ARCHITECTURE:
        return _BY_ARCHITECTURE[file.architecture]
    if file.architecture in BOUND:
        raise ConversionError(
            file.name, "general.architecture", found=file.architecture, wanted="a drafter with a memory of its own",
            remedy="It reads its target's memory, which is paged in a pool: use another drafter, or kvflash=None.",
        )  # fmt: skip
    return MTP if heads.alone(file) else SIMPLE


def wants(file: GGUF, target: GGUF) -> Features:
    """Return the rows that a drafter bound to this target needs. ConversionError if its file does not say."""
    if kind_of(file) == MTP:
        return Features(nextn=True)
    layers, own = verify.target_layers(file), target_facts.describe(target).layers
    # the output of the last layer is not the input of another
    return Features(tuple(x for x in layers if x < own), nextn=own in layers)


def _rank(candidate: tuple[GGUF, Found]) -> tuple[int, str]:
    """Sort key: the best kind of drafter first, then by name."""
    file, found = candidate
    order = (
        "selector_hidden.weight" in file.tensors,
        "markov_w1.weight" in file.tensors,
        found.type == DFLASH,
        found.type == EAGLE3,
        True,
    )
    return order.index(True), file.name
