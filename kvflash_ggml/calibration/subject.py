"""Which model a calibration is of."""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass
from typing import Any

from ..snapshot.fingerprint import ROPE, ModelFile


@dataclass(frozen=True, slots=True)
class Subject:
    """A model as it is loaded. An adapter (LoRA) does not count: the heads are those of the model under it.

    identity: of its file, and of the settings with which the same weights attend otherwise. title: what it is, in
    words that are the same for every quantisation.
    """

    identity: str
    title: str


def of_llama(llm: Any) -> Subject:
    """llm: a `llama_cpp.Llama`. OSError or SnapshotError if its file is gone or has been replaced."""
    identity = ModelFile(llm.model_path).identity()
    changed = _changed_settings(llm)
    if changed:
        identity += "-" + hashlib.sha256(repr(changed).encode()).hexdigest()[:8]
    return Subject(identity, _title(llm.metadata, llm.n_vocab()))


def rope(settings: Any) -> dict[str, Any]:
    """How positions are encoded, as llama_context_params say it."""
    return {name: getattr(settings, name) for name in ROPE}


def _changed_settings(llm: Any) -> list[tuple[str, object]]:
    """What is given beside the file: RoPE settings other than usual, and metadata that overrides the file's."""
    usual = inspect.signature(type(llm).__init__).parameters
    encoding = [(name, value) for name, value in rope(llm.context_params).items() if value != usual[name].default]
    return [*encoding, *sorted((llm.kv_overrides or {}).items())]


def _title(metadata: dict[str, str], n_vocab: int) -> str:
    architecture = metadata.get("general.architecture", "unknown")
    keys = ("block_count", "embedding_length", "attention.head_count")
    layers, width, heads = (metadata.get(f"{architecture}.{key}", "?") for key in keys)
    name = metadata.get("general.name", "without a name")
    return f"{architecture} {name}, {layers} layers of {width} values and {heads} heads, {n_vocab} tokens"
