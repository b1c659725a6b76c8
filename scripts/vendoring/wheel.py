"""Wheels for machines of others: built, given the libraries they need and their licences, tagged, installed and tried.

`python -m vendoring.wheel [--cuda] [--bundle] [DIST]`, run by scripts/wheel. What is told goes to stderr, the paths of
what was made to stdout.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from . import source
from .pin import REPO, VendorError, log
from .toolchain import ENVIRONMENT, cuda_release

_LICENSES = Path("/usr/share/common-licenses")
_OWN = "kvflash_ggml"
_BESIDE = ("router", "fleet", "benchmarks")
EXTRAS = "kvflash-ggml[server,hub,zstd]"
DEMO = (
    "scripts/demo.py", "scripts/residency_map.py", "tests/models/recall-qwen3-q8_0.gguf", "tests/text/stdlib-docs.txt",
)  # fmt: skip

_CUDA_LIBRARIES = ("libcuda.so.*", "libcudart.so.*", "libcublas.so.*", "libcublasLt.so.*")
"""What a CUDA wheel does not carry: the driver's, and those of NVIDIA's own wheels, which it requires."""

_TRIAL = """
import shutil
from kvflash_ggml.native import library
library.load()
info = library.build_info()
assert info["flavour"] == "portable", info
found = [name for name in ("cc", "c++", "gcc", "g++", "clang", "cmake", "ninja", "nvcc") if shutil.which(name)]
assert not found, found
print(info["cpu_library"], "of", ", ".join(info["cpu_variants"]))
"""

README = """\
kvflash-ggml and all that it needs, for {python} on {platform}. Neither an index nor a compiler is asked:

  python3 -m venv kvflash
  kvflash/bin/pip install --no-index --find-links wheels '{extras}' kvflash-router kvflash-fleet kvflash-bench
  kvflash/bin/kvflash-run doctor
  kvflash/bin/python demo/scripts/demo.py
"""


def main(arguments: Sequence[str]) -> int:
    """Make the wheels in the folder named; 0 on success, 1 with an explanation on stderr otherwise."""
    parser = argparse.ArgumentParser(prog="scripts/wheel", description="Make wheels for machines of others.")
    parser.add_argument("dist", nargs="?", default="dist", type=Path, metavar="DIST", help="the folder for them")
    parser.add_argument("--cuda", action="store_true", help="with CUDA, of the toolkit whose nvcc is found")
    parser.add_argument("--bundle", action="store_true", help="also an archive to install from without an index")
    options = parser.parse_args(arguments)
    try:
        check_flags(os.environ)
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            made = _make(work, cuda_release() if options.cuda else "")
            if options.bundle:
                made.append(_bundle(made, work))
                _try_bundle(made[-1], work)
            else:
                _try(made, work)
            options.dist.mkdir(parents=True, exist_ok=True)
            for file in made:
                print(shutil.copy2(file, options.dist.resolve()))
    except VendorError as error:
        log(f"error: {error}")
        return 1
    return 0


# --- what can be known without a build


def check_flags(environment: Mapping[str, str]) -> None:
    """VendorError for compiler flags that choose a CPU: the libraries that all variants share would need it."""
    for name in (*ENVIRONMENT, "CMAKE_ARGS"):
        found = re.search(r"-m(?:arch|cpu|tune)=\S+|-m(?:avx|sse4|fma|amx|bmi|f16c)\S*", environment.get(name, ""))
        if found:
            raise VendorError(f"{name} has {found[0]}, which is for one kind of CPU: unset it to build for all")


def platform_tags(wheel: Path) -> list[str]:
    """The platforms that a wheel's name claims, as ["manylinux_2_35_x86_64"]."""
    return wheel.stem.rpartition("-")[2].split(".")


def check_tags(wheel: Path) -> None:
    """VendorError unless the name claims to run beyond the machine of the build."""
    if any(tag.startswith("linux_") for tag in platform_tags(wheel)):
        raise VendorError(f"{wheel.name} is for this machine alone: auditwheel found no platform that it keeps to")


def brought(names: Iterable[str]) -> list[str]:
    """The libraries of others that auditwheel has put into a wheel, as "libgomp", from the names of its files."""
    files = (re.fullmatch(rf"{_OWN}\.libs/(lib[\w+-]+?)-[0-9a-f]{{8}}\.so[\d.]*", name) for name in names)
    return sorted({found[1] for found in files if found})


def referred(text: str) -> list[str]:
    """The common licences that a Debian copyright file refers to, by their file names."""
    return sorted(set(re.findall(rf"{_LICENSES}/(\w[\w.+-]*\w)", text)))


def cuda_requirements(release: str) -> list[str]:
    """NVIDIA's wheels that have the libraries of a CUDA release, as "12.8": not older, and of the same major."""
    major = int(release.partition(".")[0])
    suffix = f"-cu{major}" if major < 13 else ""
    return [f"nvidia-{name}{suffix}>={release},<{major + 1}" for name in ("cuda-runtime", "cublas")]


def requiring(metadata: str, requirements: Sequence[str]) -> str:
    """The METADATA of a wheel with more that it requires."""
    head, blank, text = metadata.partition("\n\n")
    return "\n".join([head, *(f"Requires-Dist: {one}" for one in requirements)]) + blank + text


# --- the build


def _make(work: Path, cuda: str) -> list[Path]:
    """cuda: the release of the toolkit to build with; "" for none."""
    flags = {"CMAKE_ARGS": f"{os.environ.get('CMAKE_ARGS', '')} -DGGML_CUDA=on"} if cuda else {}
    log("compiling, which is done once")
    _python(str(REPO / "scripts" / "vendor.py"), "build", **flags)  # shows progress, which pip would hide
    log("building the wheels")
    wheel = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w")
    _python(*wheel, str(work / "raw"), str(REPO), **flags)
    log("looking for the platforms that it keeps to")
    (raw,) = (work / "raw").glob("*.whl")
    excluded = [word for name in _CUDA_LIBRARIES for word in ("--exclude", name)] if cuda else []
    _python("-m", "auditwheel", "repair", *excluded, "-w", str(work / "repaired"), str(raw))
    (repaired,) = (work / "repaired").glob("*.whl")
    check_tags(repaired)
    made = _finished(repaired, work, cuda)
    log(f"{made.name}: {made.stat().st_size / 2**20:.1f} MiB")
    pure = work / "pure"
    _python(*wheel, str(pure), str(source.fetch()), CMAKE_ARGS="-DLLAMA_BUILD=OFF")
    (bindings,) = pure.glob("*.whl")
    _python("-m", "wheel", "tags", "--platform-tag", "any", "--remove", str(bindings))  # nothing of it was compiled
    for name in _BESIDE:
        _python(*wheel, str(pure), str(REPO / name))
    return [made, *sorted(pure.glob("*.whl"))]


def _finished(wheel: Path, work: Path, cuda: str) -> Path:
    """The wheel with the licences of the libraries that it has taken in; one with CUDA says so, and what it needs."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = brought(archive.namelist())
    _python("-m", "wheel", "unpack", "-d", str(work / "unpacked"), str(wheel))
    (tree,) = (work / "unpacked").iterdir()
    (info,) = tree.glob("*.dist-info")
    for library in libraries:
        file = _copyright(library)
        shutil.copy2(file, info / "licenses" / f"LICENSE.{library}")
        for name in referred(file.read_text(encoding="utf-8")):
            shutil.copy2(_LICENSES / name, info / "licenses" / name)
    local = []
    if cuda:
        local = ["--local-version", f"cu{cuda.partition('.')[0]}"]
        told = (info / "METADATA").read_text(encoding="utf-8")
        (info / "METADATA").write_text(requiring(told, cuda_requirements(cuda)), encoding="utf-8")
    (work / "packed").mkdir()
    _python("-m", "wheel", "pack", *local, "-d", str(work / "packed"), str(tree))
    (packed,) = (work / "packed").glob("*.whl")
    return packed


def _bundle(made: Sequence[Path], work: Path) -> Path:
    """An archive with the wheels, all that they need, and the demo."""
    log("fetching what it needs")
    name = f"{made[0].stem}-{_tag()}-offline"
    folder = work / "bundle" / name
    _python("-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--dest", str(folder / "wheels"),
            *map(str, made), EXTRAS)  # fmt: skip
    for file in DEMO:
        (folder / "demo" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPO / file, folder / "demo" / file)
    told = {"python": f"Python {sys.version_info[0]}.{sys.version_info[1]}", "platform": platform_tags(made[0])[0]}
    (folder / "README").write_text(README.format(**told, extras=EXTRAS), encoding="utf-8")
    archive = work / f"{name}.tar"
    with tarfile.open(archive, "w") as tar:  # wheels are compressed
        tar.add(folder, name)
    log(f"{archive.name}: {archive.stat().st_size / 2**20:.1f} MiB")
    return archive


def _tag() -> str:
    """The Python that fetched wheels are for."""
    return f"cp{sys.version_info[0]}{sys.version_info[1]}"


def _copyright(library: str) -> Path:
    """What Debian says about a library that the linker finds here."""
    found = re.search(rf"=> (\S*/{re.escape(library)}\.so\S*)", _output("/sbin/ldconfig", "-p"))
    owner = _output("dpkg-query", "-S", str(Path(found[1]).resolve())).partition(":")[0] if found else ""
    file = Path("/usr/share/doc", owner, "copyright")
    if not owner or not file.is_file():
        raise VendorError(f"the wheel takes in {library}, and its licence is not found: build on Debian, or its kin")
    return file


def _try(wheels: Sequence[Path], work: Path) -> None:
    log("installing into a fresh environment")
    python = _environment(work / "venv")
    _alone([python, "-m", "pip", "install", "--quiet", *map(str, wheels)], work / "venv")
    _demonstrate(python, REPO, work / "venv")


def _try_bundle(archive: Path, work: Path) -> None:
    """Do what its README says."""
    log("unpacking it, and installing into a fresh environment without an index")
    with tarfile.open(archive) as tar:
        tar.extractall(work / "tried")
    (folder,) = (work / "tried").iterdir()
    lines = [shlex.split(line) for line in (folder / "README").read_text(encoding="utf-8").splitlines()]
    (install,) = (line[1:] for line in lines if line and line[0].endswith("/pip"))
    python = _environment(work / "venv")
    alone = {"PIP_CONFIG_FILE": os.devnull}  # which may name more places for wheels
    _alone([python, "-m", "pip", "--quiet", "--isolated", *install], work / "venv", cwd=folder, **alone)
    _demonstrate(python, folder / "demo", work / "venv")


def _environment(folder: Path) -> str:
    venv.create(folder, with_pip=True)
    return str(folder / "bin" / "python")


def _demonstrate(python: str, tree: Path, place: Path) -> None:
    log("decoding there, where no compiler is found")
    for line in (["-c", _TRIAL], ["-m", "kvflash_ggml", "doctor"], [str(tree / "scripts" / "demo.py")]):
        _alone([python, *line], place, cwd=place)  # where no kvflash_ggml lies beside it


def _alone(command: Sequence[str], place: Path, *, cwd: Path = REPO, **environment: str) -> None:
    """Run in an environment whose programs are all that is found."""
    found = {"PATH": str(place / "bin"), "CC": "false", "CXX": "false", "CMAKE_ARGS": ""}
    _run(command, cwd=cwd, environment={**found, **environment})


def _python(*arguments: str, **environment: str) -> None:
    _run([sys.executable, *arguments], environment=environment)


def _run(command: Sequence[str], *, cwd: Path = REPO, environment: Mapping[str, str] = {}) -> None:
    # stdout carries the answer
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | dict(environment)
    if subprocess.run(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode:
        raise VendorError(f"failed: {' '.join(command)}")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
