"""A pytest plugin for upstream's own tests: our class in place of theirs, local models in place of downloads.

Environment: COMPAT_MODELS, a JSON object from the file names that the tests ask for to local paths; COMPAT_POOL, a
pool size, or empty for kvflash off; COMPAT_REPORT, where to write what happened.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from kvflash_ggml import Llama
from kvflash_ggml.errors import UnsupportedModelError

import llama_cpp  # isort: skip  the library is found by importing ours first

NEEDS_REAL_MODEL = {
    "test_real_model": "expects token ids and text of Qwen3.5-0.8B",
    "test_real_llama": "expects text of Qwen3.5-0.8B",
    "test_real_llama_repeated_prompt_cache": "expects text of Qwen3.5-0.8B",
}

MODELS: dict[str, str] = json.loads(os.environ["COMPAT_MODELS"])
POOL = int(os.environ["COMPAT_POOL"] or 0)
REPORT: dict[str, Any] = {"outcomes": {}, "pools": [], "evicted": {}, "refusals": [], "messages": {}}

_running = ""
_open: list[Any] = []


def local_model(repo_id: str, filename: str, **_: Any) -> str:
    return MODELS[filename]


def open_pooled(model_path: str, **kwargs: Any) -> Llama:
    """Our class with a pool; without one for a model that refuses it."""
    try:
        llm = Llama(model_path, kvflash=POOL, **kwargs)
    except UnsupportedModelError as error:
        REPORT["refusals"].append(str(error))
        return Llama(model_path, **kwargs)
    if llm.kvflash is not None:
        REPORT["pools"].append([llm.kvflash.pool, llm.kvflash.n_ctx])
        _open.append(llm)
    return llm


llama_cpp.Llama = open_pooled if POOL else Llama
huggingface_hub.hf_hub_download = local_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    REPORT["left_out"] = [item.name for item in items if item.name in NEEDS_REAL_MODEL]
    items[:] = [item for item in items if item.name not in NEEDS_REAL_MODEL]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    result = yield
    REPORT["evicted"][item.name] = sum(len(_missing(llm)) for llm in _open)
    _open.clear()
    return result


def _missing(llm: Llama) -> set[int]:
    view = llm.kvflash
    assert view is not None
    return set(range(view.chunks)) - set(view.resident_chunks)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid.rpartition("::")[2]
    if report.when == "call" or report.outcome != "passed":
        REPORT["outcomes"][name] = report.outcome
        if report.outcome != "passed":
            REPORT["messages"][name] = report.longreprtext


def pytest_sessionfinish() -> None:
    Path(os.environ["COMPAT_REPORT"]).write_text(json.dumps(REPORT), encoding="utf-8")
