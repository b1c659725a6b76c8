"""Upstream's own tests, taken from the pinned sdist when they run, pass on our class: kvflash off, on, and paging."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.compat_models import write_embedding, write_mamba
from vendoring.build import upstream_bindings, upstream_llama

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
MODELS = HERE.parent / "models"

CACHE_TESTS = [
    f"test_{what}_matches_fresh"
    for what in (
        "exact_cached_prompt_reuse",
        "loaded_exact_cached_prompt_reuse",
        "ram_cache_exact_prompt_hit",
        "shorter_prompt_prefix_reuse",
    )
]
POOL = 512
# upstream's cache tests at a length that a pool cannot hold: the same assertions on longer prompts
LONGER = (
    (r"n_(ctx|batch|ubatch)=64\b", {"ctx": "n_ctx=2048", "batch": "n_batch=256", "ubatch": "n_ubatch=256"}, 3),
    (r'(?m)^    prompt = "The quick brown fox"$', '    prompt = "The quick brown fox" + " and a lazy dog" * 180', 4),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the plugin reports of one run of upstream's tests."""

    outcomes: dict[str, str]
    messages: dict[str, str]
    pools: list[tuple[int, int]]
    evicted: dict[str, int]
    refusals: list[str]
    left_out: list[str]

    def check(self, least: int) -> None:
        assert not self.messages, "\n\n".join(f"{name}\n{text}" for name, text in self.messages.items())
        assert len(self.outcomes) >= least
        assert set(self.outcomes.values()) == {"passed"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with upstream's files where its tests look for them, and the models they ask for."""
    folder = tmp_path_factory.mktemp("upstream")
    (folder / "vendor").mkdir()
    (folder / "vendor" / "llama.cpp").symlink_to(upstream_llama())
    (folder / "tests").symlink_to(upstream_bindings() / "tests")
    write_mamba(MODELS / "scorer-qwen3-q8_0.gguf", folder / "mamba.gguf")
    write_embedding(MODELS / "scorer-qwen3-q8_0.gguf", folder / "embedding.gguf")
    shutil.copytree(MODELS / "heads", folder / "heads")
    return folder


def run(folder: Path, tests: Path, *options: str, pool: int | None) -> Run:
    models = {
        "tinyllamas/stories15M-q4_0.gguf": MODELS / "recall-qwen3-q8_0.gguf",
        "mamba-130m-hf.Q2_K.gguf": folder / "mamba.gguf",
        "Falcon-H1-Tiny-90M-Instruct-Q2_K.gguf": MODELS / "recall-qwen35-q8_0.gguf",
        "bge-small-en-v1.5-q4_k_m.gguf": folder / "embedding.gguf",
    }
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    env = os.environ | {
        "COMPAT_MODELS": json.dumps({name: str(path) for name, path in models.items()}),
        "COMPAT_POOL": str(pool or ""),
        "COMPAT_REPORT": str(report),
        "KVFLASH_HEADS": str(folder / "heads"),
        # upstream asks for every core; waiting threads must leave them to the other tests
        "OMP_WAIT_POLICY": "passive",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(REPO), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "pytest", "-p", "upstream_plugin", "-p", "no:cacheprovider", "-q"]
    command += ["--import-mode=importlib", "-c", os.devnull, "--rootdir", str(folder), *options, str(tests)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, errors="replace")
    assert report.is_file(), done.stdout[-3000:] + done.stderr[:4000]
    return Run(**json.loads(report.read_text(encoding="utf-8")))


def lengthen(folder: Path) -> Path:
    """A copy of upstream's test file with longer contexts and prompts, beside the models."""
    text = (folder / "tests" / "test_llama.py").read_text(encoding="utf-8")
    for pattern, new, count in LONGER:
        replacement = new if isinstance(new, str) else lambda found, new=new: new[found[1]]
        text, found = re.subn(pattern, replacement, text)
        assert found == count, f"{pattern} occurs {found} times"
    path = folder / "test_longer.py"
    path.write_text(text, encoding="utf-8")
    return path


def test_kvflash_off(place: Path) -> None:
    result = run(place, place / "tests", pool=None)
    result.check(least=23)
    assert not result.pools
    assert len(result.left_out) == 3  # upstream_plugin.NEEDS_REAL_MODEL says why


def test_kvflash_on(place: Path) -> None:
    result = run(place, place / "tests", pool=POOL)
    result.check(least=23)
    # their contexts of 32 and 64 tokens are padded to 256, which the pool holds
    assert len(result.pools) > 15
    assert {tuple(pool) for pool in result.pools} == {(256, 256)}
    assert_refusals(result)


@pytest.mark.slow
@pytest.mark.parametrize("pool", [None, POOL])
def test_longer_than_the_pool(place: Path, pool: int | None) -> None:
    result = run(place, lengthen(place), "-k", " or ".join(CACHE_TESTS), pool=pool)
    result.check(least=12)
    if pool is not None:
        assert {tuple(found) for found in result.pools} == {(POOL, 2048)}
        calm = [name for name, chunks in result.evicted.items() if "recurrent" not in name and chunks == 0]
        assert not calm, "nothing was paged out"
        assert_refusals(result)


def assert_refusals(result: Run) -> None:
    """The recurrent model, and nothing else, was refused, by name and with a reason."""
    assert result.refusals
    assert all("'mamba'" in text and "purely recurrent" in text for text in result.refusals)
