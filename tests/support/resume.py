"""A fresh process that goes on from snapshots. As a program: reads a plan as JSON, prints what it has computed."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from support.harness import check, row

STEPS = 64
TESTS = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "support.resume"]
"""Runs in TESTS, followed by the file of the plan."""


def go_on(llm: Any, steps: int = STEPS) -> dict[str, list[Any]]:
    """Greedy steps: the tokens, and a digest of the logits before each and after the last."""
    tokens: list[int] = []
    digests = [hashlib.sha256(row(llm).tobytes()).hexdigest()]
    for _ in range(steps):
        tokens.append(int(row(llm).argmax()))
        llm.eval(tokens[-1:])
        digests.append(hashlib.sha256(row(llm).tobytes()).hexdigest())
    return {"tokens": tokens, "digests": digests}


def main(plan: dict[str, Any]) -> dict[str, Any]:
    """plan: model, settings of Llama, and per point the file and the tokens to read before going on."""
    from kvflash_ggml import Llama

    results = {}
    layers = int(os.environ.get("KVFLASH_TEST_GPU_LAYERS", "0"))
    for name, point in plan["points"].items():
        llm = Llama(plan["model"], n_gpu_layers=layers, seed=1, verbose=False, **plan["settings"])
        length = llm.load_snapshot(point["path"])
        assert length == llm.n_tokens == llm.kvflash.length
        check(llm)
        if point["then"]:
            llm.eval(point["then"])
        results[name] = {**go_on(llm), "length": length, "page_ins": llm.kvflash.page_ins}
        check(llm)
        llm.close()
    return results


if __name__ == "__main__":
    print(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
