"""Programs that make their own `llama_cpp.Llama`: keywords, defaults of `install`, and `kvflash-run exec`."""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.harness import MODELS
from support.inside import inside

import kvflash_ggml
from kvflash_ggml import KVFlashConfig, logs
from kvflash_ggml.errors import ConfigError, LibraryError
from kvflash_ggml.llama import keywords
from kvflash_ggml.native import library

MODEL = str(MODELS / "recall-qwen3-q8_0.gguf")


@pytest.fixture
def parameters(loaded: None) -> Any:
    from kvflash_ggml.llama import parameters

    logs.warn_once.cache_clear()
    return parameters


@pytest.fixture(autouse=True)
def undone(parameters: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import llama_cpp

    for name in list(os.environ):
        if name.startswith("KVFLASH_") and name != "KVFLASH_LIB_PATH":
            monkeypatch.delenv(name)
    monkeypatch.setattr(llama_cpp, "Llama", llama_cpp.Llama)
    yield
    parameters.defaults.clear()


# --- keywords


def test_upstreams_keywords_are_known_to_type_checkers(parameters: Any) -> None:
    theirs = set(parameters.UPSTREAM_PARAMETERS) - {"self", "model_path", "kwargs"}
    assert set(keywords.UpstreamKeywords.__annotations__) == theirs


def test_the_signature_shows_everything(parameters: Any) -> None:
    shown = inspect.signature(kvflash_ggml.Llama).parameters
    assert set(shown) == {"model_path", "kwargs", *keywords.Keywords.__annotations__}
    assert shown["n_batch"].default == 512
    assert shown["kvflash"].annotation == "KVFlashConfig | int | str | None"
    assert next(iter(inspect.signature(kvflash_ggml.Llama.__init__).parameters)) == "self"


def test_what_upstream_ignores_is_ignored_and_told_once(parameters: Any, llama: Any, caplog: Any) -> None:
    for _ in range(2):
        llama(vocab_only=True, f16_kv=True, n_parts=-1, rpc_servers=None)
    assert [r.getMessage() for r in caplog.records if "f16_kv" in r.getMessage()] == [
        "ignored, as llama_cpp.Llama does, for it has no such keywords: f16_kv, n_parts"
    ]


def test_an_unknown_keyword_of_ours_is_refused(llama: Any) -> None:
    with pytest.raises(TypeError, match=r"kvflash_pol: is it kvflash_policy\?"):
        llama(kvflash=512, kvflash_pol="lru")
    with pytest.raises(TypeError, match="kvflash_sesquipedalian; there are kvflash, kvflash_policy"):
        kvflash_ggml.install(kvflash_sesquipedalian=1)  # type: ignore[call-arg]


def test_a_pool_of_bytes(llama: Any) -> None:
    token = llama(kvflash=512).kvflash.page_bytes // 64
    llm = llama(n_ctx=4096, kvflash=f"{(1024 * token + 5 * token) // 1024 + 1}kB")
    assert llm.kvflash.pool == 1024
    assert "MiB asked for, at 3.0 KiB a token" in llm.kvflash.banner()
    assert llama(n_ctx=4096, kvflash="1k").kvflash.pool == 1024
    assert llama(kvflash="off").kvflash is None
    assert "pool 512 of 1024 tokens (100 asked for, raised to the minimum" in llama(kvflash=100).kvflash.banner()


def test_with_a_pool_the_context_is_the_trained_one(parameters: Any) -> None:
    llm = kvflash_ggml.Llama(MODEL, kvflash=512, verbose=False)
    assert llm.n_ctx() == llm.kvflash.n_ctx == 131072  # type: ignore[union-attr]
    llm.close()
    assert "n_ctx" not in parameters.read({}, {}).upstream


# --- install


def made(**given: Any) -> Any:
    import llama_cpp

    return llama_cpp.Llama(MODEL, **({"n_ctx": 2048, "verbose": False} | given))


def test_install_gives_defaults() -> None:
    kvflash_ggml.install(kvflash=512, kvflash_policy="lru", n_batch=64)
    llm, own, without = made(), made(kvflash=1024, n_batch=128), made(kvflash=None)
    assert (llm.kvflash.pool, llm.kvflash.policy, llm.n_batch) == (512, "lru", 64)
    assert (own.kvflash.pool, own.kvflash.policy, own.n_batch) == (1024, "qk", 128)
    assert without.kvflash is None
    kvflash_ggml.install()
    assert made().kvflash is None


def test_install_refuses_at_once() -> None:
    kvflash_ggml.install()
    for bad in ({"kvflash": "many"}, {"kvflash_tau": 5}, {"kvflash": 512, "flash_attn": False}):
        with pytest.raises(ConfigError):
            kvflash_ggml.install(**bad)  # type: ignore[arg-type]
    assert made().kvflash is None


def test_install_reads_the_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVFLASH_TAU", "8")
    kvflash_ggml.install()
    assert made().kvflash is None, "a variable beside no pool is for runs that have one"
    for name, value in {"POOL": "1k", "CACHE": str(tmp_path), "CACHE_SIZE": "1M", "POLICY": "lru"}.items():
        monkeypatch.setenv(f"KVFLASH_{name}", value)
    kvflash_ggml.install()
    llm = made()
    assert (llm.kvflash.pool, llm.kvflash.policy, inside(llm).config.tau) == (1024, "lru", 8)
    assert inside(llm).prefixes.cache.folder == tmp_path
    assert inside(llm).prefixes.cache.disk_bytes == 1 << 20
    llm.close()
    kvflash_ggml.install(kvflash=KVFlashConfig(pool=512))
    assert inside(made()).config == KVFlashConfig(pool=512)
    monkeypatch.setenv("KVFLASH_POOL", "plenty")
    with pytest.raises(ConfigError, match="KVFLASH_POOL: 'plenty'"):
        kvflash_ggml.install()


def test_drafts_are_given_too(monkeypatch: pytest.MonkeyPatch) -> None:
    kvflash_ggml.install(kvflash=512, kvflash_policy="lru", kvflash_spec="ngram")
    assert made().kvflash.spec.types == ("ngram",)
    assert made(kvflash_spec="none").kvflash.spec is None
    for name, value in {"POOL": "512", "POLICY": "lru", "SPEC": "ngram"}.items():
        monkeypatch.setenv(f"KVFLASH_{name}", value)
    kvflash_ggml.install()
    assert made().kvflash.spec.types == ("ngram",)
    monkeypatch.setenv("KVFLASH_SPEC", "clairvoyance")
    with pytest.raises(ConfigError, match="clairvoyance"):
        kvflash_ggml.install()


@pytest.mark.parametrize("pool", [None, 512])
@pytest.mark.parametrize("layers", [-1, 99])
def test_layers_are_computed_on_the_cpu_where_there_is_no_gpu(
    pool: int | None, layers: int, llama: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As stock does, with one line; where a GPU would idle, only a program that does not know this package goes on."""
    if library.supports_gpu_offload():
        pytest.skip("this build has a GPU")
    asked = {"n_gpu_layers": layers, "kvflash": pool}
    monkeypatch.setattr(library, "machine_has_gpu", lambda: False)
    for _ in range(2):
        llama(**asked).eval([1, 2, 3])
    assert [line for line in caplog.messages if "GPU" in line] == [
        f"n_gpu_layers={layers}: no GPU was found, so the CPU computes every layer."
    ]
    caplog.clear()
    monkeypatch.setattr(library, "machine_has_gpu", lambda: True)
    with pytest.raises(LibraryError, match=f"n_gpu_layers={layers}, but .* built without a GPU backend"):
        llama(**asked)
    kvflash_ggml.install()
    for _ in range(2):
        llama(**asked).eval([1, 2, 3])
    [line] = [line for line in caplog.messages if "GPU" in line]
    assert "The CPU computes every layer. Rebuild it" in line


def test_a_program_that_turns_flash_attention_off_knows_nothing_of_the_pool(caplog: Any) -> None:
    kvflash_ggml.install(kvflash=512)
    with caplog.at_level(logging.WARNING):
        assert [made(flash_attn=False).kvflash.pool for _ in range(2)] == [512, 512]
    assert [r.getMessage() for r in caplog.records] == [
        "flash_attn=False of the program is raised to True: a pool needs flash attention"
    ]
    with pytest.raises(ConfigError, match="flash_attn=False"):
        made(kvflash=512, flash_attn=False)


# --- exec

PROGRAM = f"""
from llama_cpp import Llama
llm = Llama({MODEL!r}, n_ctx=2048, verbose=False, flash_attn=False, f16_kv=True)
print(llm.kvflash.pool, llm.kvflash.policy)
"""


def execute(*line: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvflash_ggml.cli", "exec", *line]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, check=False)


@pytest.mark.parametrize("how", ["code", "script", "module"])
def test_exec_runs_a_program_with_a_pool(how: str, tmp_path: Path) -> None:
    (tmp_path / "prog.py").write_text(PROGRAM)
    line = {"code": ["python", "-c", PROGRAM], "script": ["prog.py"], "module": ["python", "-m", "prog"]}[how]
    done = execute("--kvflash", "512", "--kvflash-policy", "lru", "--", *line, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "512 lru\n"), done.stderr
    ignored, raised, banner = done.stderr.splitlines()
    assert ignored.startswith("kvflash: warning: ignored")
    assert ignored.endswith(": f16_kv")
    assert raised.startswith("kvflash: warning: flash_attn=False of the program is raised")
    assert banner.startswith("kvflash: pool 512 of 2048 tokens (512 asked for), ")


def test_exec_ends_as_the_program_does() -> None:
    assert execute("--kvflash", "auto", "--", "python", "-c", "raise SystemExit(7)").returncode == 7
