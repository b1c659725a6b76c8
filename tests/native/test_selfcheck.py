"""Products of weights in the CPU's extra buffer types, with the real library: right, wrong, and those that crash."""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvflash_ggml import Llama
from kvflash_ggml.native import library, trial

# What reaches a packed buffer is changed on the way: the first tensor that is written after one was made.
FAULT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <string.h>
#include <stdlib.h>
static int packed;
void * ggml_backend_alloc_ctx_tensors_from_buft(void * ctx, void * buft) {
    void * (*real)(void *, void *) = dlsym(RTLD_NEXT, "ggml_backend_alloc_ctx_tensors_from_buft");
    const char * (*name)(void *) = dlsym(RTLD_NEXT, "ggml_backend_buft_name");
    packed |= strcmp(name(buft), "CPU") != 0;
    return real(ctx, buft);
}
void ggml_backend_tensor_set(void * tensor, const void * data, size_t offset, size_t size) {
    void (*real)(void *, const void *, size_t, size_t) = dlsym(RTLD_NEXT, "ggml_backend_tensor_set");
    char * copy = memcpy(malloc(size), data, size);
    if (packed) {
        packed = 0;
        FAULT
    }
    real(tensor, copy, offset, size);
    free(copy);
}
"""
WRONG, CRASH = "memset(copy + size/2, 0, size/2);", "raise(SIGILL);"

CHILD = """
import ctypes, json
from kvflash_ggml.native import library, trial
library.load()
print(json.dumps(trial.check_weights(ctypes.CDLL(str(library.libllama_path())), lambda **said: None)))
"""


@pytest.fixture
def packed(loaded: None) -> dict[str, int]:
    """Extra buffer types of this CPU that take weights."""
    found = trial.check_weights(ctypes.CDLL(str(library.libllama_path())), lambda **said: None)
    if not any(found.values()):
        pytest.skip("this CPU has no kernels for packed weights")
    return found


def run(folder: Path, fault: str, *command: str) -> subprocess.CompletedProcess[str]:
    source, preload = folder / "fault.c", folder / "fault.so"
    source.write_text(FAULT.replace("        FAULT\n", f"        {fault}\n"))
    if subprocess.run(["cc", "-shared", "-fPIC", "-o", str(preload), str(source), "-ldl"]).returncode:
        pytest.skip("needs a C compiler")
    env = os.environ | {"LD_PRELOAD": str(preload)}
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True)


def test_the_cpu_multiplies_packed_weights_as_plain_ones(packed: dict[str, int]) -> None:
    said: list[Any] = []
    llama = ctypes.CDLL(str(library.libllama_path()))
    assert trial.check_weights(llama, lambda **values: said.append(values["buffer"])) == packed
    assert said == [*packed, None]
    assert llama.kvf_selfcheck(len(packed), ctypes.byref(ctypes.c_int32())) < 0


def test_a_wrong_product_is_found_and_names_type_and_buffer(packed: dict[str, int], tmp_path: Path) -> None:
    assert run(tmp_path, "", "-c", CHILD).stdout.startswith("{")
    wrong = run(tmp_path, WRONG, "-c", CHILD)
    assert wrong.returncode == 1
    assert "weights in a buffer of type" in wrong.stderr
    assert "allowed is 0.01" in wrong.stderr


@pytest.mark.parametrize(("fault", "text"), [(CRASH, "crashes with SIGILL: weights"), (WRONG, "it is wrong: weights")])
def test_a_build_with_such_a_kernel_is_not_kept(packed: dict[str, int], tmp_path: Path, fault: str, text: str) -> None:
    files = [str(path) for path in library.library_folder().iterdir()]
    tried = run(tmp_path, fault, str(Path(trial.__file__)), *files)
    assert tried.returncode == 1
    assert text in tried.stdout
    assert next(name for name, types in packed.items() if types) in tried.stdout
    assert "--no-repack" in tried.stdout


def test_plain_weights_are_the_way_around(
    packed: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ["-c", "from kvflash_ggml.cli.child import check_first_run; check_first_run(repack=REPACK)"]
    for repack in True, False:
        done = run(tmp_path, CRASH, words[0], words[1].replace("REPACK", str(repack)))
        assert (done.returncode == 0) == (not repack), done.stderr


def test_weights_are_packed_unless_it_is_said(
    packed: dict[str, int], model: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """llama.cpp's log names the buffers that the weights are in."""
    import llama_cpp

    path, params = tmp_path / "q4_0.gguf", llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True
    assert llama_cpp.llama_model_quantize(os.fsencode(model("small")), os.fsencode(path), params) == 0
    settings: dict[str, Any] = {"n_ctx": 512, "kvflash": 512, "n_threads": 1, "verbose": True}
    if not any(f"{name} model buffer" in log(capfd, lambda: Llama(str(path), **settings)) for name in packed):
        pytest.skip("no kernels for packed Q4_0 weights")
    plain = Llama(str(path), use_extra_bufts=False, **settings)
    again = pickle.dumps(plain)
    plain.close()
    told = log(capfd, lambda: pickle.loads(again))
    assert "model buffer" in told
    assert not any(f"{name} model buffer" in told for name in packed)


def log(capfd: pytest.CaptureFixture[str], make: Callable[[], Llama]) -> str:
    capfd.readouterr()
    make().close()
    return capfd.readouterr().err
