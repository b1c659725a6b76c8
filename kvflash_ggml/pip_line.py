"""The pip command that installs this package again, or more of it: no package index is asked to have it.

pip records in direct_url.json (PEP 610) where it took a package from: a folder, a file, a repository, or an index.
Imports stand in the functions: an error needs them, and every program that imports the package would pay for them.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_NAME = "kvflash-ggml"


def install(extra: str = "") -> str:
    """Return the command that installs this copy with an extra, as "pip install -e '.[server]'".

    extra: its name in pyproject.toml, or "" for none.
    """
    return _line(_flags(), "pip install", _requirement(f"[{extra}]" if extra else ""))


def reinstall(variables: str = "") -> str:
    """Return the command that builds and installs this copy again, without touching its dependencies.

    variables: assignments before the command. Without CMAKE_ARGS among them the flags of this build are kept, and as
    "$CMAKE_ARGS" among them: the shell in which this is typed need not know what the build was given.
    """
    flags = _flags()
    if "CMAKE_ARGS" in variables:
        known = flags.removeprefix('CMAKE_ARGS="').removesuffix('"')
        variables, flags = variables.replace("$CMAKE_ARGS", known or "$CMAKE_ARGS"), ""
    return _line(variables, flags, "pip install --force-reinstall --no-cache-dir --no-deps", _requirement(""))


def install_into(python: str) -> str:
    """Return the command that installs this copy into the environment of another Python."""
    flags = _flags() or 'CMAKE_ARGS="-DLLAMA_BUILD=OFF"'
    return _line(flags, shlex.quote(python), "-m pip install", _requirement(""))


def _line(*words: str) -> str:
    return " ".join(filter(None, words))


def _flags() -> str:
    """Write the variable with the CMake definitions of this build, where pip would build it: for a folder or a
    repository.
    """
    import importlib.metadata

    origin = _origin()
    if origin is None or not origin.keys() & {"dir_info", "vcs_info"}:
        return ""
    info = Path(str(importlib.metadata.distribution(_NAME).locate_file("kvflash_ggml/_build_info.json")))
    defines = json.loads(info.read_text(encoding="utf-8"))["cmake_defines"] if info.is_file() else {}
    words = [f"-D{name}={value}" for name, value in defines.items()]
    return f'CMAKE_ARGS="{shlex.join(["-DLLAMA_BUILD=OFF", *words])}"' if words else ""


def _requirement(extra: str) -> str:
    """Write the words that name this copy to pip."""
    from urllib.request import url2pathname

    origin = _origin()
    if origin is None:
        return shlex.quote(_NAME + extra)
    url = origin["url"]
    if vcs := origin.get("vcs_info"):
        return shlex.quote(f"{_NAME}{extra} @ {vcs['vcs']}+{url}@{vcs['commit_id']}")
    parts = urlsplit(url)
    if parts.scheme != "file":
        return shlex.quote(f"{_NAME}{extra} @ {url}")
    path = Path(url2pathname(parts.path))
    where = "." if path == Path.cwd() else str(path)
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return editable + shlex.quote(where + extra)


def _origin() -> dict[str, Any] | None:
    """Return pip's record; for a checkout that was never installed its folder; None for a package from an index."""
    import importlib.metadata

    try:
        record = importlib.metadata.distribution(_NAME).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return {"url": Path(__file__).resolve().parents[1].as_uri()}
    return None if record is None else json.loads(record)
