"""The pip command that a message names: it must work for the copy that is installed."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvflash_ggml import pip_line

REPO = Path(__file__).parents[2]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Call it with what pip recorded about the origin of this package; None where an index had it."""

    def recorded(origin: dict[str, Any] | None, **defines: str) -> None:
        (tmp_path / "build.json").write_text(json.dumps({"cmake_defines": defines}))

        class Distribution:
            def locate_file(self, name: str) -> Path:
                assert name == "kvflash_ggml/_build_info.json"
                return tmp_path / "build.json"

            def read_text(self, name: str) -> str | None:
                assert name == "direct_url.json"
                return None if origin is None else json.dumps(origin)

        monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution())

    return recorded


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        (None, "pip install 'kvflash-ggml[server]'"),
        ({"url": "file:///src/kv", "dir_info": {}}, "pip install '/src/kv[server]'"),
        ({"url": "file:///src/a%20b", "dir_info": {"editable": True}}, "pip install -e '/src/a b[server]'"),
        ({"url": "file:///d/k-0.1.0-cp310-abi3-linux_x86_64.whl", "archive_info": {}},
         "pip install '/d/k-0.1.0-cp310-abi3-linux_x86_64.whl[server]'"),
        ({"url": "https://host/k.whl", "archive_info": {}}, "pip install 'kvflash-ggml[server] @ https://host/k.whl'"),
        ({"url": "https://host/k.git", "vcs_info": {"vcs": "git", "commit_id": "0a1b"}},
         "pip install 'kvflash-ggml[server] @ git+https://host/k.git@0a1b'"),
    ],
)  # fmt: skip
def test_the_line_names_where_this_copy_came_from(origin: Any, line: str, installed: Any) -> None:
    installed(origin)
    assert pip_line.install("server") == line


def test_in_its_own_folder_the_line_is_the_one_of_the_documents(
    installed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    installed({"url": tmp_path.as_uri(), "dir_info": {}})
    assert pip_line.install("server") == "pip install '.[server]'"
    assert pip_line.reinstall() == "pip install --force-reinstall --no-cache-dir --no-deps ."


def test_an_extra_does_not_cost_the_gpu(installed: Any) -> None:
    """pip builds a folder again, whatever it is asked for: with the flags of the build that is there."""
    flags = 'CMAKE_ARGS="-DLLAMA_BUILD=OFF -DGGML_CUDA=on"'
    installed({"url": "file:///src/kv", "dir_info": {}}, GGML_CUDA="on")
    assert pip_line.install("server") == f"{flags} pip install '/src/kv[server]'"
    assert pip_line.reinstall() == f"{flags} pip install --force-reinstall --no-cache-dir --no-deps /src/kv"
    assert pip_line.reinstall("CMAKE_ARGS=-DX=1").startswith("CMAKE_ARGS=-DX=1 pip install")
    more = pip_line.reinstall('CMAKE_ARGS="$CMAKE_ARGS -DX=1"')
    assert more.startswith('CMAKE_ARGS="-DLLAMA_BUILD=OFF -DGGML_CUDA=on -DX=1" pip install')
    assert pip_line.reinstall("CFLAGS=-O1").startswith(f"CFLAGS=-O1 {flags} pip install")
    assert pip_line.install_into("/p").startswith(f"{flags} /p -m pip install")
    installed({"url": "file:///d/k.whl", "archive_info": {}}, GGML_CUDA="on")
    assert pip_line.install("server") == "pip install '/d/k.whl[server]'"


def test_a_checkout_that_was_never_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def nothing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", nothing)
    monkeypatch.chdir(tmp_path)
    assert pip_line.install() == f"pip install {REPO}"


def test_another_environment_gets_no_second_llama(installed: Any) -> None:
    installed({"url": "file:///src/kv", "dir_info": {}})
    line = """CMAKE_ARGS="-DLLAMA_BUILD=OFF" '/my env/bin/python' -m pip install /src/kv"""
    assert pip_line.install_into("/my env/bin/python") == line


def test_no_message_or_page_sends_to_an_index_that_lacks_the_package() -> None:
    files = [*REPO.glob("*.md"), *(REPO / "docs").glob("*.md"), *(REPO / "kvflash_ggml").rglob("*.py")]
    wrong = [f"{path.name}: {line}" for path in files for line in path.read_text(encoding="utf-8").splitlines()
             if re.search(r"pip install (\S+ )*['\"]?kvflash-ggml", line) and path.name != "CHANGELOG.md"
             and "pip install dist/*.whl" not in line]  # fmt: skip
    assert not wrong
