"""What must be equal for saved KV bytes to mean the same."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import CHUNK
from ..native.library import build_info

if TYPE_CHECKING:
    from ..native.engine import Engine, Layer

HEAD = 32 << 20
"""The beginning of a GGUF file that is read as a whole: metadata and the list of tensors lie there."""

SAMPLES = 64
SAMPLE = 64 << 10

ROPE = (
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
)

Fingerprint = dict[str, Any]


def of_engine(engine: Engine) -> Fingerprint:
    """The shape and the form of the cached bytes."""
    info = engine.info
    return {
        "chunk": CHUNK,
        "type_k": info.type_k,
        "type_v": info.type_v,
        "rotated": info.rotated,
        "n_pos": info.n_pos,
        "n_swa": info.n_swa,
        "recurrent": info.recurrent,
        "layers": [_shape(layer) for layer in engine.layers],
    }


def of_llama(llm: Any, engine: Engine) -> Fingerprint:
    """The model, how positions are encoded, and the build that computes. llm: a `llama_cpp.Llama`."""
    params = llm.context_params
    architecture = llm.metadata.get("general.architecture", "unknown")
    trained = llm.metadata.get(f"{architecture}.rope.scaling.original_context_length")
    return {
        "architecture": architecture,
        "model": of_file(llm.model_path),
        "lora": [of_file(llm.lora_path), llm.lora_scale] if llm.lora_path else None,
        "kv_overrides": repr(llm.kv_overrides),
        "n_vocab": llm.n_vocab(),
        "llama.cpp": build_info()["llama_cpp_commit"],
        **of_engine(engine),
        "rope": [float(getattr(params, name)) for name in ROPE],
        # some models have other RoPE factors for contexts that are longer than this
        "long_context": trained is not None and llm.n_ctx() > int(trained),
    }


def of_file(path: str | Path) -> str:
    """Which model a GGUF file is, wherever it lies: a hash of its size, its head and samples of its tensors.

    All parts of a split model count.
    """
    parts = list(_parts(Path(path)))
    return _hash_parts(tuple((str(part), part.stat().st_size, part.stat().st_mtime_ns) for part in parts))


@lru_cache(maxsize=16)
def _hash_parts(parts: tuple[tuple[str, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for name, size, _ in parts:
        digest.update(size.to_bytes(8, "little"))
        with Path(name).open("rb", buffering=0) as file:
            digest.update(file.read(HEAD))
            for i in range(1, SAMPLES + 1):
                at = max(HEAD, (size - SAMPLE) * i // SAMPLES)
                digest.update(os.pread(file.fileno(), SAMPLE, at))
    return digest.hexdigest()[:32]


def _parts(path: Path) -> Iterator[Path]:
    split = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    if split is None:
        yield path
        return
    stem, count = split.groups()
    for i in range(1, int(count) + 1):
        yield path.with_name(f"{stem}-{i:05}-of-{count}.gguf")


def _shape(layer: Layer) -> list[int]:
    values = asdict(layer)
    values.pop("scale", None)  # known only where queries are captured
    return [int(value) for value in values.values()]
