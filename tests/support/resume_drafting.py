"""A text goes on with drafts. As a program: a fresh process that goes on from a snapshot, by a plan in JSON."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "support.resume_drafting"]
"""Runs in tests/, followed by the file of the plan."""


def go_on(llm: Any, count: int) -> dict[str, Any]:
    """Greedy: the tokens, a digest of the logits that each was chosen by, and the steps that this took."""
    tokens, digests = [], []
    for token in islice(llm.generate(llm.input_ids[: llm.n_tokens].tolist(), temp=0.0), count):
        tokens.append(token)
        digests.append(hashlib.sha256(llm.newest_logits().tobytes()).hexdigest())
    done = llm.kvflash.spec.last
    steps = [done.steps, done.plain_steps, done.drafted, done.accepted, done.reached, done.agreed]
    return {"tokens": tokens, "digests": digests, "steps": steps}


def main(plan: dict[str, Any]) -> dict[str, Any]:
    """plan: model, settings of Llama, those of its drafts, the snapshot, and how many tokens to go on."""
    from kvflash_ggml import Llama
    from kvflash_ggml.config import SpecConfig

    spec = plan["spec"]
    spec = SpecConfig(**spec | {"types": tuple(spec["types"]), "draft": spec["draft"] and Path(spec["draft"])})
    layers = int(os.environ.get("KVFLASH_TEST_GPU_LAYERS", "0"))
    llm = Llama(plan["model"], n_gpu_layers=layers, verbose=False, kvflash_spec=spec, **plan["settings"])
    llm.load_snapshot(plan["path"])
    done = go_on(llm, plan["count"])
    llm.close()
    return done


if __name__ == "__main__":
    print(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
