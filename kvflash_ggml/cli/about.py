"""What doctor says of a model: how long a text it was trained for, and what that takes with a pool and without."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from ..errors import UnsupportedModelError
from .child import Child
from .terminal import size_text

_POOL = 4096


def facts(path: str) -> dict[str, Any]:
    """In the child process. Bytes are of an f16 cache."""
    import llama_cpp
    from llama_cpp import _internals as internals

    from ..placement import sizing

    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    with closing(internals.LlamaModel(path_model=path, params=params, verbose=False)) as model:
        metadata = model.metadata()
        refused, slot_bytes = None, 0
        try:
            slot_bytes = sizing.slot_size(model, llama_cpp.llama_context_default_params())
        except UnsupportedModelError as error:
            refused = str(error)
        return {
            "architecture": metadata.get("general.architecture", "unknown"),
            "n_ctx_train": model.n_ctx_train(),
            "chat_template": any(name.startswith("tokenizer.chat_template") for name in metadata),
            "token_bytes": slot_bytes,
            "refused": refused,
        }


def lines(child: Child) -> list[str]:
    """What the child has found out, for people; nothing if it came to nothing."""
    about = child.said.get("about")
    if about is None:
        return []
    length, size = about["n_ctx_train"], about["token_bytes"]
    template = "a chat template" if about["chat_template"] else "no chat template, so no chat"
    found = [f"{about['architecture']}, trained for {length:,} tokens, {template}"]
    if about["refused"] is None:
        pool = min(_POOL, length)
        found.append(
            f"can be pooled: a full f16 cache takes {size_text(length * size)}, a pool of {pool:,} tokens "
            f"{size_text(pool * size)} and up to {size_text(length * size)} on the host"
        )
    return found
