"""Two content-addressed builds in the user's cache: ggml alone, then libllama with our C++ inside.

The first takes minutes (hours with CUDA) and depends on the sdist and the flags; the second is
redone when a patch or our C++ changes, incrementally: sources are synchronised by content, so that
only what really changed is compiled again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .patches import Patch, read_series, series_hash
from .pin import REPO, Pin, VendorError, cache_dir, digest, digest_files, load_pin, locked, log
from .source import BINDINGS, ggml_version, llama_source, patched_tree, pristine_tree
from .toolchain import Toolchain

STAGES = Path(__file__).parent
NATIVE = REPO / "kvflash_ggml" / "native"
# One plain file per library, loadable from any folder: the SONAME is the file name, and siblings
# are found beside it. Versioned names would become full copies in a wheel.
COMMON = (
    "-DBUILD_SHARED_LIBS=ON",
    "-DCMAKE_PLATFORM_NO_VERSIONED_SONAME=ON",
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    "-DCMAKE_INSTALL_RPATH=$ORIGIN",
)
SYNCED = (
    "CMakeLists.txt", "LICENSE", "cmake", "common", "ggml/cmake", "include", "licenses", "src",
    "tests", "tools/mtmd", "vendor",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """Where one combination of source, patches, shim and flags is built and kept."""

    pin: Pin
    toolchain: Toolchain
    source: Path
    series: tuple[Patch, ...]
    developer: bool
    ggml: Path
    work: Path
    out: Path


def plan(toolchain: Toolchain) -> Plan:
    """Resolve the source and compute every key; builds nothing."""
    pin = load_pin()
    source = llama_source(patched_tree(pin))
    developer = bool(os.environ.get("KVFLASH_LLAMA_SOURCE"))
    series = () if developer else tuple(read_series())
    deep = [p for p in series if any(_compiled(f, toolchain) for f in p.files)]
    if developer:
        origin, content = _stat_digest(source, ("ggml",)), _stat_digest(source, SYNCED)
    else:
        origin, content = pin.sha256 + series_hash(deep), pin.sha256 + series_hash(series)
    first, second = ((STAGES / stage / "CMakeLists.txt").read_bytes() for stage in ("ggml", "llama"))
    kernels = [digest_files(NATIVE, kernel_files())] if toolchain.flag("GGML_CUDA", default=False) else []
    ggml_key = digest(origin, first, *COMMON, *toolchain.identity(), *kernels)[:20]
    work_key = digest(ggml_key, toolchain.generator or "")[:20]
    out_key = digest(content, second, digest_files(NATIVE, shim_files()))[:20]
    cache = cache_dir()
    work = cache / "llama" / work_key
    return Plan(
        pin=pin,
        toolchain=toolchain,
        source=source,
        series=series,
        developer=developer,
        ggml=cache / "ggml" / ggml_key,
        work=work,
        out=work / "out" / out_key,
    )


def _compiled(file: str, toolchain: Toolchain) -> bool:
    """Whether a file of upstream's is of the first stage. Of Vulkan's backend it is where that is built."""
    return file.startswith("ggml/") and (
        not file.startswith("ggml/src/ggml-vulkan/") or toolchain.flag("GGML_VULKAN", default=False)
    )


def shim_files() -> list[Path]:
    """Our C++: headers and sources."""
    return sorted([*NATIVE.glob("*.h"), *NATIVE.glob("*.cpp")])


def kernel_files() -> list[Path]:
    """Our CUDA: a part of the first stage, since the backend calls it."""
    return sorted(NATIVE.glob("*.cu*"))


def build(p: Plan) -> None:
    """Make `p.ggml` and `p.out` exist."""
    _build_ggml(p)
    _build_llama(p)


def _build_ggml(p: Plan) -> None:
    with locked(p.ggml.with_name(p.ggml.name + ".lock")):
        if p.ggml.is_dir():
            log(f"ggml: cached ({p.ggml.name})")
            return
        work = p.ggml.with_name(p.ggml.name + ".build")
        temp = p.ggml.with_name(p.ggml.name + ".new")
        log("ggml: configuring")
        _cmake(p, work, "ggml", p.source, [f"-DKVFLASH_NATIVE={NATIVE}"])
        log("ggml: compiling (minutes on a CPU, much longer with CUDA; done once per set of flags)")
        make(p.toolchain, work, "all")
        shutil.rmtree(temp, ignore_errors=True)
        run([p.toolchain.cmake, "--install", str(work), "--prefix", str(temp)])
        temp.rename(p.ggml)
        shutil.rmtree(work)


def _build_llama(p: Plan) -> None:
    with locked(p.work / ".lock"):
        if p.out.is_dir():
            log(f"libllama: cached ({p.out.name})")
            return
        log(f"libllama: {_sync_sources(p)} source files changed, compiling")
        _configure_llama(p)
        made: list[Path] = []
        for name in ("llama", "mtmd", "kvf_chat"):
            make(p.toolchain, p.work / "build", name)
            made += (p.work / "build" / "bin").glob(f"*{name}.*")
        _try(p, made)
        _publish(made, p.out)


def _try(p: Plan, made: Sequence[Path]) -> None:
    """Decode with what was built before it is taken for good. A cross build cannot be tried here."""
    if p.toolchain.cross:
        log("self-check: not tried, the build is for another machine")
        return
    libraries = [*(f for f in (p.ggml / "lib").iterdir() if f.is_file()), *made]
    command = [sys.executable, str(NATIVE / "trial.py"), *map(str, libraries)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    told = (done.stdout + done.stderr).strip()
    if done.returncode:
        raise VendorError(f"the libraries were built, but do not work on this machine:\n{told}")
    log(f"self-check: {told}")


def build_tool(p: Plan, name: str) -> Path:
    """One of upstream's own programs, linked to our libllama; returns the executable."""
    build(p)
    target = p.out.with_name(f"{p.out.name}-{name}")
    with locked(p.work / ".lock"):
        if not target.is_dir():
            _sync_sources(p)
            _configure_llama(p)
            make(p.toolchain, p.work / "build", name)
            _publish([p.work / "build" / name, *p.out.iterdir()], target)
    return target / name


def _sync_sources(p: Plan) -> int:
    changed = _sync(p.source, p.work / "src", SYNCED)
    return changed + _sync(NATIVE, p.work / "native", [f.name for f in shim_files()])


def _publish(files: Iterable[Path], target: Path) -> None:
    temp = target.with_name(target.name + ".new")
    shutil.rmtree(temp, ignore_errors=True)
    temp.mkdir(parents=True)
    for file in files:
        shutil.copy2(file, temp)
    temp.rename(target)


def _configure_llama(p: Plan) -> None:
    paths = [str(p.ggml), *filter(None, [p.toolchain.defines.get("CMAKE_PREFIX_PATH")])]
    prefix = [f"-Dggml_DIR={p.ggml}/lib/cmake/ggml", f"-DCMAKE_PREFIX_PATH={';'.join(paths)}"]
    native = [f"-DKVFLASH_NATIVE={p.work / 'native'}"]
    commit = [f"-DLLAMA_BUILD_COMMIT={p.pin.commit}", "-DLLAMA_BUILD_NUMBER=0"]
    _cmake(p, p.work / "build", "llama", p.work / "src", prefix + native + commit)


def _cmake(p: Plan, work: Path, stage: str, source: Path, extra: Sequence[str]) -> None:
    work.mkdir(parents=True, exist_ok=True)
    project = work.parent / f"{work.name}.cmake"  # not in the checkout: clones share the build
    _sync(STAGES / stage, project, ["CMakeLists.txt"])
    base = [p.toolchain.cmake, "-S", str(project), "-B", str(work)]
    run([*base, *p.toolchain.arguments(), *COMMON, *extra, f"-DKVFLASH_SOURCE={source}"])


def run(command: Sequence[str]) -> None:
    """Run a step of a build; its output goes to stderr. VendorError if it fails."""
    # Upstream would take the commit of a repository around the cache for its own.
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(cache_dir().parent)}
    try:
        # stdout carries the answer of vendor.py; a compiler's chatter is not it.
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    except FileNotFoundError as error:
        raise VendorError(f"{command[0]} not found: install it, for example 'pip install cmake'") from error
    if done.returncode:
        raise VendorError(f"failed with exit code {done.returncode}: {' '.join(command)}")


def make(toolchain: Toolchain, work: Path, target: str) -> None:
    """Build one target of a configured folder, on all cores unless CMAKE_BUILD_PARALLEL_LEVEL says otherwise."""
    command = [toolchain.cmake, "--build", str(work), "--target", target]
    if "CMAKE_BUILD_PARALLEL_LEVEL" not in os.environ:
        command += ["--parallel", str(os.cpu_count() or 1)]
    run(command)


def _sync(source: Path, target: Path, names: Iterable[str]) -> int:
    """Make `target` hold exactly the `names` of `source`; equal files keep their times."""
    wanted: dict[str, Path] = {}
    for name in names:
        top = source / name
        files = [f for f in top.rglob("*") if f.is_file()] if top.is_dir() else [top]
        wanted |= {f.relative_to(source).as_posix(): f for f in files if f.is_file()}
    changed = 0
    for old in [f for f in target.rglob("*") if f.is_file()] if target.is_dir() else []:
        if old.relative_to(target).as_posix() not in wanted:
            old.unlink()
            changed += 1
    for name, file in wanted.items():
        copy, content = target / name, file.read_bytes()
        if not copy.is_file() or copy.read_bytes() != content:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)
            changed += 1
    return changed


def _stat_digest(root: Path, names: Sequence[str]) -> str:
    """A developer tree is known by its files' sizes and times: reading it all would be slower."""
    files = (f for name in names for f in [root / name, *(root / name).rglob("*")] if f.is_file())
    stats = ((f.relative_to(root).as_posix(), f.stat()) for f in sorted(files))
    return digest(*(f"{name} {s.st_size} {s.st_mtime_ns}" for name, s in stats))


def assemble(p: Plan, target: Path) -> None:
    """Lay out what the wheel carries: ``lib/``, ``licenses/`` and ``_build_info.json``."""
    shutil.rmtree(target, ignore_errors=True)
    lib, licenses = target / "lib", target / "licenses"
    lib.mkdir(parents=True)
    libraries = [f for folder in (p.ggml / "lib", p.out) for f in sorted(folder.iterdir()) if f.is_file()]
    for file in libraries:
        shutil.copy2(file, lib)
    licenses.mkdir()
    shutil.copy2(p.source / "LICENSE", licenses / "LICENSE.llama.cpp")
    shutil.copy2(p.source / "AUTHORS", licenses / "AUTHORS.llama.cpp")
    # libmtmd contains it, and its licence is in its source alone
    terms = (p.source / "vendor/hash/xxhash/xxhash.c").read_text(encoding="utf-8").partition("*/")[0]
    (licenses / "LICENSE.xxHash").write_text(f"{terms}*/\n", encoding="utf-8")
    shutil.copy2(p.source / "licenses" / "LICENSE-jsonhpp", licenses / "LICENSE.json")
    if not p.developer:  # a tree of one's own has no sdist behind it, which would have to be downloaded
        bindings = pristine_tree(p.pin) / BINDINGS
        shutil.copy2(bindings / "LICENSE.md", licenses / "LICENSE.llama-cpp-python.md")
    (licenses / "NOTICE").write_text(notice(p), encoding="utf-8")
    info = json.dumps(build_info(p, lib), indent=2)
    (target / "_build_info.json").write_text(info + "\n", encoding="utf-8")


def build_info(p: Plan, lib: Path) -> dict[str, object]:
    """What this build is made of, as `kvflash_ggml.build_info()` reports it."""
    names = sorted(f.name for f in lib.iterdir())
    backends = [m.group(1) for n in names if (m := re.match(r"libggml-(?!base|cpu-)([\w-]+)\.", n))]
    variants = [m.group(1) for n in names if (m := re.match(r"libggml-cpu-([\w.-]+)\.", n))]
    version = re.search(r'^version = "(.*)"', (REPO / "pyproject.toml").read_text(), re.MULTILINE)
    return {
        "version": version.group(1) if version else "",
        "llama_cpp_python": p.pin.version,
        "llama_cpp_commit": "developer tree" if p.developer else p.pin.commit,
        "ggml": ggml_version(p.source),
        "sdist_sha256": p.pin.sha256,
        "patches": [patch.name for patch in p.series],
        "patches_hash": series_hash(p.series)[:12],
        "cmake_defines": dict(sorted(p.toolchain.defines.items())),
        "flavour": p.toolchain.flavour,
        "backends": [*backends, *(["cpu"] if variants else [])],
        "cpu_variants": variants,
        "libraries": names,
    }


def notice(p: Plan) -> str:
    """The NOTICE of the wheel: whose code it carries, and how it was changed."""
    origin = f"llama.cpp commit {p.pin.commit} as carried by {p.pin.requirement}"
    lines = [
        "This package contains llama.cpp and ggml, (c) The ggml authors, MIT licence, built from",
        f"{'a developer tree of llama.cpp' if p.developer else origin}.",
        "libmtmd contains xxHash, (c) Yann Collet, BSD 2-Clause licence, and stb_image, miniaudio,",
        "SHA-1 and SHA-256, which are in the public domain.",
        "libkvf_chat contains JSON for Modern C++, (c) Niels Lohmann, MIT licence.",
        f"It is used through {p.pin.name}, (c) Andrei Betlen, MIT licence, not contained here.",
    ]
    if p.series:
        lines += ["", "llama.cpp was changed by these patches:"]
        lines += [f"  {patch.name}: {patch.field('Why')}" for patch in p.series]
    return "\n".join(lines) + "\n"


def native_key(p: Plan) -> str:
    """Changes whenever an installed copy of the native part would be out of date."""
    extra = [REPO / "pyproject.toml", REPO / "CMakeLists.txt", NATIVE / "build_ffi.py", *(REPO / "startup").glob("*")]
    return digest(p.ggml.name, p.out.name, digest_files(REPO, [f for f in extra if f.is_file()]))[:20]


def upstream_bindings() -> Path:
    """Upstream's own ``tests/`` and ``llama_cpp/`` folders, as shipped in the pinned sdist."""
    return pristine_tree() / BINDINGS


def upstream_llama() -> Path:
    """The llama.cpp folder of the patched tree."""
    return llama_source(patched_tree())
