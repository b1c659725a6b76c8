"""Upstream's own programs, without a patch: what our figures are compared with. No wheel carries them."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from .build import make, run
from .pin import cache_dir, digest, load_pin, locked, log
from .source import LLAMA, pristine_tree
from .toolchain import Toolchain

PROGRAMS = ("llama-batched-bench", "llama-server", "llama-bench")

MORE = ("tools", "scripts")
"""Of the sdist, beside what our own build extracts."""

DEFINES = (
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    # the sdist has no assets of the server's page: without this they would be downloaded
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_NUMBER=0",
)


def build_stock(toolchain: Toolchain) -> Path:
    """Return the folder in the cache that has PROGRAMS. Builds them, in some five minutes on two cores, if it is new.

    The flags of `toolchain` are those of our own build; all else is upstream's default.
    """
    pin = load_pin()
    target = cache_dir() / "stock" / digest(pin.sha256, *DEFINES, *toolchain.identity())[:20]
    with locked(target.with_name(target.name + ".lock")):
        if target.is_dir():
            log(f"stock: cached ({target.name})")
            return target
        tree = pristine_tree(dataclasses.replace(pin, extract=(*pin.extract, *MORE)))
        work, temp = (target.with_name(f"{target.name}.{kind}") for kind in ("build", "new"))
        base = [toolchain.cmake, "-S", str(tree / LLAMA), "-B", str(work)]
        log("stock: compiling (minutes on a CPU, much longer with CUDA; done once per set of flags)")
        run([*base, *toolchain.arguments(), *DEFINES, f"-DLLAMA_BUILD_COMMIT={pin.commit}"])
        shutil.rmtree(temp, ignore_errors=True)
        temp.mkdir(parents=True)
        for name in PROGRAMS:
            make(toolchain, work, name)
            shutil.copy2(work / "bin" / name, temp)
        temp.rename(target)
        shutil.rmtree(work)
    return target
