"""A wheel for CPUs of others: built, given the libraries it needs and their licences, tagged, installed and tried.

`python -m vendoring.wheel DIST`, run by scripts/wheel. What is told goes to stderr, the paths of the wheels to stdout.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from . import source
from .pin import REPO, VendorError, log
from .toolchain import ENVIRONMENT

_LICENSES = Path("/usr/share/common-licenses")
_OWN = "kvflash_ggml"

_TRIAL = """
import kvflash_ggml
kvflash_ggml.load()
info = kvflash_ggml.build_info()
assert info["flavour"] == "portable", info
print(info["cpu_library"], "of", ", ".join(info["cpu_variants"]))
"""


def main(arguments: Sequence[str]) -> int:
    """Make the wheels in the folder named; 0 on success, 1 with an explanation on stderr otherwise."""
    dist = Path(arguments[0]).resolve()
    try:
        check_flags(os.environ)
        with tempfile.TemporaryDirectory() as folder:
            made = _make(Path(folder))
            _try(made, Path(folder) / "venv")
            dist.mkdir(parents=True, exist_ok=True)
            for wheel in made:
                print(shutil.copy2(wheel, dist))
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


# --- the build


def _make(work: Path) -> list[Path]:
    log("building the wheel")
    _python("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(work / "raw"), str(REPO))
    log("looking for the platforms that it keeps to")
    (raw,) = (work / "raw").glob("*.whl")
    _python("-m", "auditwheel", "repair", "-w", str(work / "repaired"), str(raw))
    (repaired,) = (work / "repaired").glob("*.whl")
    check_tags(repaired)
    wheel = _with_licenses(repaired, work)
    log(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB")
    bindings = {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF"}
    sdist = str(source.fetch())
    _python("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(work / "pure"), sdist, **bindings)
    return [wheel, *(work / "pure").glob("*.whl")]


def _with_licenses(wheel: Path, work: Path) -> Path:
    """The wheel with the licences of the libraries that it has taken in."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = brought(archive.namelist())
    _python("-m", "wheel", "unpack", "-d", str(work / "unpacked"), str(wheel))
    (tree,) = (work / "unpacked").iterdir()
    (folder,) = tree.glob("*.dist-info/licenses")
    for library in libraries:
        file = _copyright(library)
        shutil.copy2(file, folder / f"LICENSE.{library}")
        for name in referred(file.read_text(encoding="utf-8")):
            shutil.copy2(_LICENSES / name, folder / name)
    _python("-m", "wheel", "pack", "-d", str(work), str(tree))
    return work / wheel.name


def _copyright(library: str) -> Path:
    """What Debian says about a library that the linker finds here."""
    found = re.search(rf"=> (\S*/{re.escape(library)}\.so\S*)", _output("/sbin/ldconfig", "-p"))
    owner = _output("dpkg-query", "-S", str(Path(found[1]).resolve())).partition(":")[0] if found else ""
    file = Path("/usr/share/doc", owner, "copyright")
    if not owner or not file.is_file():
        raise VendorError(f"the wheel takes in {library}, and its licence is not found: build on Debian, or its kin")
    return file


def _try(wheels: Sequence[Path], folder: Path) -> None:
    log("installing into a fresh environment")
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    _run([python, "-m", "pip", "install", "--quiet", *map(str, wheels)])
    log("decoding there")
    for command in (["-c", _TRIAL], ["-m", "kvflash_ggml.cli", "doctor"]):
        _run([python, *command], cwd=folder)  # where no kvflash_ggml lies beside it


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
