"""The pip command that installs this package again, or more of it: no package index is asked to have it.

pip records in direct_url.json (PEP 610) where it took a package from: a folder, a file, a repository, or an index.
"""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

_NAME = "kvflash-ggml"
_NO_SECOND_LLAMA = 'CMAKE_ARGS="-DLLAMA_BUILD=OFF"'


def install(extra: str = "", *, options: str = "", pip: str = "pip") -> str:
    """Return the command that installs this copy with an extra, as "pip install -e '.[server]'".

    extra: its name in pyproject.toml, or "" for none. options: words before the requirement. pip: how pip is called.
    """
    return " ".join(filter(None, [pip, "install", options, _requirement(f"[{extra}]" if extra else "")]))


def reinstall() -> str:
    """Return the command that builds and installs this copy again, without touching its dependencies."""
    return install(options="--force-reinstall --no-cache-dir --no-deps")


def install_into(python: str) -> str:
    """Return the command that installs this copy into the environment of another Python."""
    return f"{_NO_SECOND_LLAMA} {install(pip=f'{shlex.quote(python)} -m pip')}"


def _requirement(extra: str) -> str:
    """The words that name this copy to pip."""
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
    """The record of pip; of a checkout that was never installed its folder; None for a package from an index."""
    try:
        record = importlib.metadata.distribution(_NAME).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return {"url": Path(__file__).resolve().parents[1].as_uri()}
    return None if record is None else json.loads(record)
