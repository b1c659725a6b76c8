"""Threads of a CPU wait for each other at our barrier: it is cut out of the patched source, and driven alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from support.archs import missing_sources
from vendoring.build import upstream_llama

SOURCE = Path(__file__).parents[1] / "support" / "barrier.c"
DOZES = 127

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the barrier is upstream's"),
    pytest.mark.skipif(bool(missing_sources()), reason="there are no sources of llama.cpp"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the barrier, and all that only the barrier calls, in a header."""
    path = tmp_path_factory.mktemp("barrier")
    text = (upstream_llama() / "ggml/src/ggml-cpu/ggml-cpu.c").read_text(encoding="utf-8")
    pattern = r"^#if defined\(__gnu_linux__\) && defined\(SYS_futex\)\n.*?^void ggml_barrier\(.*?^\}"
    found = re.search(pattern, text, re.DOTALL | re.MULTILINE)
    assert found, "the barrier is not ours, or has moved: read its new form, and mend this test"
    (path / "barrier_cut.h").write_text(f"{found[0]}\n", encoding="utf-8")
    return path


def compiled(folder: Path, *flags: str) -> Path:
    compiler = os.environ.get("CC") or shutil.which("cc") or pytest.skip("needs a C compiler")
    program = folder / "-".join(["barrier", *flags]).replace("=", "-")
    warnings = ["-Wall", "-Wextra"]
    command = [compiler, "-std=c11", "-O2", *warnings, *flags, f"-I{folder}", SOURCE, "-o", program, "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and flags:
        pytest.skip(f"the compiler has not {flags}: {done.stderr}")
    assert (done.returncode, done.stderr) == (0, "")
    return program


def run(program: Path, *words: object) -> str:
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("flags", [(), ("-fsanitize=thread",)], ids=["plain", "sanitizer"])
def test_no_thread_passes_early_and_none_sleeps_for_ever(folder: Path, flags: tuple[str, ...]) -> None:
    """Up to twelve threads, another number in each graph, with work of random length. The sanitizer sees each order."""
    assert run(compiled(folder, *flags), "storm", 20 if flags else 60) == "0 asleep\n"


def test_threads_that_spun_in_vain_sleep_at_once(folder: Path) -> None:
    """The last thread comes when the other one sleeps: each spin in vain doubles the waits until the next."""
    spun = [int(rounds) for rounds in run(compiled(folder), "waits", 1000, 0).split()]
    at = [i for i, rounds in enumerate(spun) if rounds]
    gaps = [after - before for before, after in pairwise(at)]
    assert gaps[0] == 1
    assert all(after == min(2 * before, DOZES + 1) for before, after in pairwise(gaps))
    assert gaps[-1] == DOZES + 1


def test_threads_spin_again_where_that_is_enough(folder: Path) -> None:
    """The last thread comes soon. One wait has been spun in vain for ever so often before."""
    spun = [int(rounds) for rounds in run(compiled(folder), "waits", 1000, 300).split()][1000:]
    assert len(spun) == 300
    first = next(i for i, rounds in enumerate(spun) if rounds)
    assert first <= DOZES
    assert all(spun[first:])
