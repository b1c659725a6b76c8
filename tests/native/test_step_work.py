"""What an engine says of the work of a step: of its weights a token meets all but the embedding, and some experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.inside import inside

from kvflash_ggml.gguf.reader import read


@pytest.mark.parametrize("kind", ["dense", "hybrid", "of qwen3moe"])
def test_a_step_multiplies_with_the_weights_of_a_token(
    kind: str, llama: Callable[..., Any], model: Callable[[str], Path]
) -> None:
    file, few = read(model(kind)), {}
    if experts := file.own("expert_count", 0):
        few = {"kv_overrides": {f"{file.architecture}.expert_used_count": 1}}
    share = 1 / experts if experts else 1.0
    llm = llama(kind, n_ctx=1024, kvflash=512, kvflash_policy="lru", **few)
    want = 0.0
    for tensor in file.tensors.values():
        matrix = math.prod(tensor.shape[1:]) > 1
        computed = tensor.name.startswith(("blk.", "output."))
        if tensor.name == "token_embd.weight":
            computed = "output.weight" not in file.tensors
        if matrix and computed:
            want += math.prod(tensor.shape) * (share if "exps." in tensor.name else 1)
    assert (experts > 1) == ("moe" in kind)
    assert inside(llm).session.engine.info.step_work == want
