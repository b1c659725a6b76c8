"""The self-check of a build, with the real libraries."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvflash_ggml.native import library, trial


def libraries() -> list[Path]:
    return list(library.library_folder().iterdir())


def test_the_installed_build_runs() -> None:
    assert trial.attempt(libraries()) == (True, "a model was decoded")


def test_what_the_build_was_made_for_is_known(loaded: None) -> None:
    features = trial.built_for(ctypes.CDLL(None))
    if "flags" in trial.cpu():
        assert "sse3" in features
        assert trial.missing(features) == []


def _compile(folder: Path, name: str, code: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    target = folder / name
    subprocess.run([compiler, "-shared", "-fPIC", "-xc", "-", "-o", str(target)], input=code, text=True, check=True)
    return target


def test_a_crash_while_loading_is_a_failure(tmp_path: Path) -> None:
    crash = "#include <signal.h>\n__attribute__((constructor)) static void load(void) { raise(SIGILL); }\n"
    fine, text = trial.attempt([*libraries(), _compile(tmp_path, "libggml-crash.so", crash)])
    assert not fine
    assert "it crashes with SIGILL" in text
    assert "GGML_NATIVE=OFF" in text


@pytest.mark.parametrize("verb", [["{model}", "-n", "1", "Hello"], ["doctor", "{model}"]])
def test_the_command_line_tells_a_crash(verb: list[str], model: Callable[[str], Path], tmp_path: Path) -> None:
    """A decode that dies: in the child, so that there is somebody left to say so."""
    for path in libraries():
        shutil.copy2(path, tmp_path)
    crash = "#include <signal.h>\n__attribute__((constructor)) static void load(void) { raise(SIGSEGV); }\n"
    _compile(tmp_path, "libggml-crash.so", crash)
    words = [word.format(model=model("small")) for word in verb]
    env = os.environ | {"KVFLASH_LIB_PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-m", "kvflash_ggml.cli", *words], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "crashed with SIGSEGV" in done.stdout + done.stderr


def test_a_missing_driver_is_not_held_against_the_build(tmp_path: Path) -> None:
    driver = _compile(tmp_path, "libdriver.so.1", "int driver(void) { return 0; }\n")
    needy = tmp_path / "libggml-needy.so"
    compiler = shutil.which("cc") or "gcc"
    subprocess.run([compiler, "-shared", "-Wl,--no-as-needed", str(driver), "-o", str(needy)], check=True)
    driver.unlink()
    fine, text = trial.attempt([*libraries(), needy])
    assert fine
    assert text.startswith("not tried: ")
    assert "libdriver.so.1" in text or str(driver) in text
