"""Which compiler and flags a build would use: what the cache keys are made of."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .pin import VendorError

# Every variable through which a user can change what the compilers do, apart from CC and CXX: the
# compilers go into the key by what they say they are, since "cc" and "gcc" are often the same.
ENVIRONMENT = (
    "CPPFLAGS", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDACXX", "CUDAFLAGS", "CUDAARCHS",
    "CUDAHOSTCXX", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "HIPCXX", "HIPFLAGS",
)  # fmt: skip

# Flags in CMAKE_ARGS that mean the pure-Python dependency, not us.
FOREIGN = ("LLAMA_BUILD", "LLAVA_BUILD")

# What a build with Vulkan needs beside a compiler.
VULKAN_PACKAGES = "glslc libvulkan-dev spirv-headers"

# The flavour for CPUs of others: a CPU backend for each kind of them, which ggml chooses among and loads when it runs.
PORTABLE = {"GGML_BACKEND_DL": True, "GGML_CPU_ALL_VARIANTS": True, "GGML_NATIVE": False}


@dataclass(frozen=True, slots=True)
class Toolchain:
    """CMake, its generator, and the user's ``-D`` definitions."""

    defines: Mapping[str, str] = field(default_factory=dict)
    cmake: str = "cmake"
    generator: str | None = None
    make_program: str | None = None

    def flag(self, name: str, *, default: bool) -> bool:
        """A boolean definition, read the way CMake reads it."""
        value = self.defines.get(name)
        return default if value is None else _true(value)

    @property
    def native(self) -> bool:
        """Whether it is for CPUs like this machine's; ggml's default, unless a build is to be reproducible."""
        return self.flag("GGML_NATIVE", default="SOURCE_DATE_EPOCH" not in os.environ)

    @property
    def flavour(self) -> str:
        """What CPUs the libraries are for: "native", "portable", or "fixed" to those that have what the flags say."""
        if all(self.flag(name, default=not wanted) == wanted for name, wanted in PORTABLE.items()):
            return "portable"
        return "native" if self.native else "fixed"

    @property
    def cross(self) -> bool:
        """Whether the user asks for libraries that may not run on this machine."""
        names = ("CMAKE_TOOLCHAIN_FILE", "CMAKE_SYSTEM_NAME", "CMAKE_SYSTEM_PROCESSOR", "CMAKE_OSX_ARCHITECTURES")
        return any(self.defines.get(name) for name in names) or bool(os.environ.get("CMAKE_TOOLCHAIN_FILE"))

    def arguments(self) -> list[str]:
        """Configure arguments shared by both stages."""
        args = ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_INSTALL_LIBDIR=lib", "--no-warn-unused-cli"]
        if self.generator:
            args += ["-G", self.generator]
        if self.make_program:
            args.append(f"-DCMAKE_MAKE_PROGRAM={self.make_program}")
        args.append("-DGGML_CCACHE=OFF")  # ggml would wrap the compiler a second time
        if self.flag("GGML_BACKEND_DL", default=False):
            args.append("-DCMAKE_INSTALL_BINDIR=lib")  # ggml would put its backends where programs go
        if shutil.which("ccache"):
            args += [f"-DCMAKE_{lang}_COMPILER_LAUNCHER=ccache" for lang in ("C", "CXX", "CUDA")]
        return args + [f"-D{name}={value}" for name, value in sorted(self.defines.items())]

    def identity(self) -> list[str]:
        """Everything that can change the machine code, as text."""
        parts = [f"{name}={value}" for name, value in sorted(self.defines.items()) if not name.endswith("_LAUNCHER")]
        parts += [f"{name}={os.environ[name]}" for name in ENVIRONMENT if name in os.environ]
        parts += [platform.system(), platform.machine()]
        parts += [_version(self._compiler("C", "CC", ("cc", "gcc", "clang")))]
        parts += [_version(self._compiler("CXX", "CXX", ("c++", "g++", "clang++")))]
        if self.native:
            parts.append(_cpu_features())
        if self.flag("GGML_CUDA", default=False):
            parts += self._cuda_identity()
        if self.flag("GGML_VULKAN", default=False):
            parts.append(self._vulkan_identity())
        return parts

    def _compiler(self, language: str, variable: str, usual: Sequence[str]) -> list[str]:
        given = self.defines.get(f"CMAKE_{language}_COMPILER") or os.environ.get(variable)
        if given:
            return shlex.split(given)
        for name in usual:
            if found := shutil.which(name):
                return [found]
        raise VendorError(
            f"no {language} compiler found (tried {', '.join(usual)}). Install one, for example "
            f"with 'apt install g++', or set {variable}."
        )

    def nvcc(self) -> str:
        """The CUDA compiler. VendorError where there is none."""
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
        nvcc = self.defines.get("CMAKE_CUDA_COMPILER") or os.environ.get("CUDACXX")
        nvcc = nvcc or shutil.which("nvcc") or str(Path(home) / "bin" / "nvcc")
        if shutil.which(nvcc) is None:
            raise VendorError(
                f"GGML_CUDA is on but there is no CUDA compiler ({nvcc}). Install the CUDA toolkit "
                "(the driver alone is not enough) or set CUDACXX to the path of nvcc."
            )
        return nvcc

    def _cuda_identity(self) -> list[str]:
        parts = [_version([self.nvcc()])]
        if "CMAKE_CUDA_ARCHITECTURES" not in self.defines and shutil.which("nvidia-smi"):
            parts.append(_output(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]))
        return parts

    def _vulkan_identity(self) -> str:
        glslc = self.defines.get("Vulkan_GLSLC_EXECUTABLE") or str(Path(os.environ.get("VULKAN_SDK", "")) / "bin/glslc")
        glslc = shutil.which(glslc) or shutil.which("glslc") or ""
        if not glslc:
            raise VendorError(
                "GGML_VULKAN is on but there is no compiler of shaders (glslc). Install it, and what else the build "
                f"needs: apt install {VULKAN_PACKAGES} (Debian 12, Ubuntu 24.04)"
            )
        return _output([glslc, "--version"])


def cuda_release() -> str:
    """The release of the toolkit that a build with CUDA would take, as "12.8". VendorError where there is none."""
    nvcc = Toolchain(defines=user_defines()).nvcc()
    said = _output([nvcc, "--version"])
    found = re.search(r"release (\d+\.\d+)", said)
    if found is None:
        raise VendorError(f"{nvcc} --version names no release of CUDA: {said.strip()}")
    return found[1]


def user_defines(extra: Sequence[str] = ()) -> dict[str, str]:
    """``-D`` definitions of ``CMAKE_ARGS``, then `extra` (``NAME=VALUE``), less foreign ones."""
    found: dict[str, str] = {}
    words = shlex.split(os.environ.get("CMAKE_ARGS", ""))
    for i, word in enumerate(words):
        if word == "-D" and i + 1 < len(words):
            _define(found, words[i + 1])
        elif word.startswith("-D") and len(word) > 2:
            _define(found, word[2:])
    for word in extra:
        _define(found, word)
    return found


def portable_defines(defines: Mapping[str, str]) -> dict[str, str]:
    """The user's definitions and those of the portable flavour.

    Raises:
        VendorError: a definition of the user's says otherwise.
    """
    for name, wanted in PORTABLE.items():
        if name in defines and _true(defines[name]) != wanted:
            raise VendorError(
                f"a portable build has {name}={_cmake(wanted)}, but {name}={defines[name]} was given: leave it out, "
                "or build for this machine alone, without --portable and KVFLASH_PORTABLE"
            )
    return {**defines, **{name: _cmake(wanted) for name, wanted in PORTABLE.items()}}


def _true(value: str) -> bool:
    return value.upper() not in {"", "0", "OFF", "NO", "FALSE", "N", "IGNORE", "NOTFOUND"}


def _cmake(value: bool) -> str:
    return "ON" if value else "OFF"


def _define(into: dict[str, str], text: str) -> None:
    name, _, value = text.partition("=")
    name = name.partition(":")[0]
    if name and name not in FOREIGN:
        into[name] = value


def _version(command: list[str]) -> str:
    """What a compiler says it is, less the name it was called by, plus its fixed arguments."""
    return " ".join([*command[1:], *_output([*command, "--version"]).split()[1:]])


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise VendorError(f"cannot run {command[0]}: {error}") from error
    return done.stdout


def _cpu_features() -> str:
    """A native build runs only on CPUs with the same features."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor()
    lines = {line for line in info.read_text().splitlines() if line.startswith(("flags", "Features"))}
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
