"""The retrieval heads that are known of a model, and the file that keeps them, which names their model."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import env
from ..errors import ConfigError, brief
from ..policy.base import KeyShape, Pairs
from ..policy.heads import as_heads
from ..snapshot.fingerprint import ROPE, ModelFile

if TYPE_CHECKING:
    from llama_cpp import Llama, llama_context_params

KIND = "kvflash retrieval heads"
VERSION = 1

MAX_BYTES = 1 << 20
"""Largest file of heads that is read; the package writes a few KiB."""


@dataclass(frozen=True, slots=True)
class ModelId:
    """A loaded model. An adapter (LoRA) does not count: its heads are the model's.

    identity: of its file, and of settings that change the attention of the same weights. title: a description that is
    the same for every quantisation.
    """

    identity: str
    title: str


def of_llama(llm: Llama) -> ModelId:
    """Return the identity of a model. OSError or SnapshotError if its file is gone or was
    replaced.
    """
    identity = ModelFile(llm.model_path).identity()
    changed = _changed_settings(llm)
    if changed:
        identity += "-" + hashlib.sha256(repr(changed).encode()).hexdigest()[:8]
    return ModelId(identity, _title(llm.metadata, llm.n_vocab()))


def rope(settings: llama_context_params) -> dict[str, Any]:
    """Return the encoding of positions, as fields of llama_context_params."""
    return {name: getattr(settings, name) for name in ROPE}


def _changed_settings(llm: Llama) -> list[tuple[str, object]]:
    """Return the settings beside the file: RoPE settings other than usual, and metadata that overrides the file's."""
    usual = inspect.signature(type(llm).__init__).parameters
    encoding = [(name, value) for name, value in rope(llm.context_params).items() if value != usual[name].default]
    return [*encoding, *sorted((llm.kv_overrides or {}).items())]


def _title(metadata: dict[str, str], n_vocab: int) -> str:
    architecture = metadata.get("general.architecture", "unknown")
    keys = ("block_count", "embedding_length", "attention.head_count")
    layers, width, heads = (metadata.get(f"{architecture}.{key}", "?") for key in keys)
    name = metadata.get("general.name", "without a name")
    return f"{architecture} {name}, {layers} layers of {width} values and {heads} heads, {n_vocab} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadScore:
    """A query head. layer: of the model, as its file counts. found, control, first: see measure.HeadStats."""

    layer: int
    head: int
    found: float
    control: float
    first: float
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The retrieval heads of a model.

    model, title: its identity and title (see ModelId). heads: the best ones, best first; none chosen: all count.
    agreed: how many of the chosen heads each document alone would have chosen too. None is for unknown values.
    """

    model: str
    questions: int
    tokens: int
    heads: tuple[HeadScore, ...]
    agreed: int | None = None
    title: str | None = None

    @property
    def chosen(self) -> list[tuple[int, int]]:
        """(layer of the model, head)."""
        return [(x.layer, x.head) for x in self.heads if x.chosen]

    def among(self, layers: Sequence[int]) -> Pairs | None:
        """Return the chosen heads as the policy counts them, None if all count. layers: the pooled ones, in order."""
        if not self.chosen:
            return None
        return as_heads((layers.index(layer), head) for layer, head in self.chosen)


def heads_file(identity: str) -> Path:
    """Return where the heads of a model are kept for later runs."""
    return env.heads_dir() / f"{identity}.json"


def save(calibration: Calibration, path: Path) -> None:
    """Write the file, as a whole or not at all."""
    from ..files import replacing  # here: a model's heads are found once

    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"kind": KIND, "version": VERSION, **asdict(calibration)}, indent=1)
    with replacing(path) as file:
        file.write(text.encode() + b"\n")


def read(path: Path) -> Calibration:
    """Return the content of a file, of any model. ConfigError if it is not a file of heads."""
    try:
        if path.stat().st_size > MAX_BYTES or not path.is_file():  # a pipe would wait for a writer
            raise ValueError
        return _parse(json.loads(path.read_bytes()))
    except OSError as err:
        raise ConfigError(
            f"the calibration {path} cannot be read: {err.strerror}: make it with 'kvflash-run calibrate MODEL --save'"
        ) from err
    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as err:
        raise ConfigError(f"{path} is no file of retrieval heads: make one with 'kvflash-run calibrate'") from err


def load(path: Path, *, model_id: ModelId, layers: Sequence[int], shapes: Sequence[KeyShape]) -> Calibration:
    """Read a file. ConfigError if it is not a file of heads, is of another model, or names heads that this model does
    not pool.

    A file of the same model in another quantisation, or with other settings, is accepted: `Calibration.model` tells.
    """
    calibration = read(path)
    if calibration.model != model_id.identity and calibration.title != model_id.title:
        theirs = calibration.title or "another model"
        raise ConfigError(
            f"{path} was made for {brief(theirs)} ({brief(calibration.model)}); this model is {brief(model_id.title)}"
            f" ({model_id.identity}): make a file for it with 'kvflash-run calibrate'"
        )
    sizes = {layer: shape.n_head for layer, shape in zip(layers, shapes, strict=True)}
    for layer, head in calibration.chosen:
        if not 0 <= head < sizes.get(layer, 0):
            raise ConfigError(f"{path} names head {layer}.{head}, which this model does not have: calibrate it anew")
    return calibration


def _parse(facts: Any) -> Calibration:
    if facts["kind"] != KIND or facts["version"] != VERSION:
        raise ValueError
    heads = tuple(
        HeadScore(
            layer=_whole(x["layer"]),
            head=_whole(x["head"]),
            found=float(x["found"]),
            control=float(x["control"]),
            first=float(x["first"]),
            chosen=x["chosen"] is True,
        )
        for x in facts["heads"]
    )
    agreed, title = facts.get("agreed"), facts.get("title")  # older files lack them
    return Calibration(
        model=str(facts["model"]),
        questions=_whole(facts["questions"]),
        tokens=_whole(facts["tokens"]),
        heads=heads,
        agreed=None if agreed is None else _whole(agreed),
        title=None if title is None else str(title),
    )


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError
    return value
