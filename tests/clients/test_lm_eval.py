"""lm-eval measures a pool by the server: its numbers are the full cache's, digit for digit.

`scripts/test --clients` installs it. The tasks are examples/lm_eval: passages of a text of this repository.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tests"))
from support.serving import serve  # noqa: E402

PLACES = REPO / ".venv-clients"
LM_EVAL = PLACES / "measure/bin/lm_eval"
MODEL = REPO / "tests/models/recall-qwen3-q8_0.gguf"
TASKS = REPO / "examples/lm_eval"


def measured(folder: Path, *options: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The results of each task, and what the server said of each request. options: of the server."""
    folder.mkdir()
    fixed = ("-c", "8192", "-ub", "128", "-a", "recall", "-q")
    with serve(MODEL, *options, *fixed, python=PLACES / "bin/python") as server:
        asked = f"model=recall,base_url=http://127.0.0.1:{server.port}/v1/completions,max_length=8192"
        line = ["run", "--model", "local-completions", "--model_args", asked, "--include_path", str(TASKS)]
        line += ["--tasks", "continued,recalled", "--output_path", str(folder), "--log_samples"]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HOME": str(folder)}
        done = subprocess.run(
            [LM_EVAL, *line],
            capture_output=True,
            text=True,
            timeout=1800,
            env={**os.environ, **offline},
            cwd=folder,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    (results,) = (json.loads(path.read_text())["results"] for path in folder.rglob("results_*.json"))
    said = {}
    for path in folder.rglob("samples_*.jsonl"):
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        said[path.name.split("_")[1]] = [one["resps"] for one in sorted(samples, key=lambda one: one["doc_id"])]
    return results, said


def test_a_pool_has_the_numbers_of_the_full_cache(tmp_path: Path) -> None:
    if not LM_EVAL.exists():
        pytest.skip("lm-eval is not there: scripts/test --clients installs it")
    results, pool = measured(tmp_path / "pool", "--kvflash", "512")
    _, full = measured(tmp_path / "full", "--kvflash", "8192")
    assert pool == full
    assert {name: len(samples) for name, samples in pool.items()} == {"continued": 4, "recalled": 4}
    assert results["recalled"]["acc,none"] == 1.0, "a choice is recognised by the fact in its passage"
