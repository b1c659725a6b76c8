"""Before the first run of a build: a child process tries it, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvflash_ggml.cli import child as first_run
from kvflash_ggml.cli.child import Child
from kvflash_ggml.errors import LibraryError
from kvflash_ggml.native import trial

TOLD = r"crashed with SIGSEGV: it uses AMX.*\nlast words\nBuild it again: CFLAGS="


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What the children were asked for; they work. The library folder is `lib`, the cache is empty."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libllama.so").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(first_run.library, "library_folder", lambda: tmp_path / "lib")
    monkeypatch.setattr(trial, "cpu", lambda: {"model name": "A", "flags": "avx amx_int8"})
    return answer(monkeypatch, Child(said={}, doing="start", failure=""))


def answer(monkeypatch: pytest.MonkeyPatch, child: Child) -> list[str]:
    seen: list[str] = []

    def run(model: str | None, *, timeout: float, module: str, entry: str) -> Child:
        assert (model, module) == (None, first_run.__name__)
        seen.append(entry)
        return child

    monkeypatch.setattr(first_run, "run_child", run)
    return seen


def test_once_for_each_build_and_cpu(asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first_run.check_first_run()
    first_run.check_first_run()
    assert asked == ["main"]
    monkeypatch.setattr(trial, "cpu", lambda: {"model name": "B", "flags": "avx"})
    first_run.check_first_run()
    assert len(asked) == 2
    (tmp_path / "lib" / "libllama.so").write_text("rebuilt")
    first_run.check_first_run()
    assert len(asked) == 3


def test_a_crash_is_told_every_time(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    failure = "crashed with SIGSEGV\nlast words"
    crash = Child(said={"features": ["amx_int8"]}, doing="start", failure=failure, crashed=True)
    seen = answer(monkeypatch, crash)
    for _ in range(2):
        with pytest.raises(LibraryError, match=TOLD):
            first_run.check_first_run()
    assert len(seen) == 2


def test_weights_that_are_not_packed_are_tried_by_themselves(asked: list[str]) -> None:
    first_run.check_first_run()
    first_run.check_first_run(repack=False)
    first_run.check_first_run(repack=False)
    assert asked == ["main", "plain"]
    assert all(callable(getattr(first_run, entry)) for entry in asked)


@pytest.mark.parametrize("crashed", [True, False])
def test_packed_weights_that_fail_are_told_with_the_way_around(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, crashed: bool
) -> None:
    answer(monkeypatch, Child(said={"buffer": "AMX"}, doing="start", failure="q4_K: off by 1", crashed=crashed))
    with pytest.raises(LibraryError, match=r"buffer type AMX: q4_K: off by 1\nBuild it again with .*--no-repack"):
        first_run.check_first_run()


def test_other_failures_are_left_to_the_run(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = answer(monkeypatch, Child(said={}, doing="start", failure="LibraryError: x is missing"))
    first_run.check_first_run()
    first_run.check_first_run()
    assert len(seen) == 2


def test_a_cache_that_cannot_be_written(asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    first_run.check_first_run()
    assert len(asked) == 1


def test_what_is_not_built_is_not_tried(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise LibraryError("no libllama.so")

    monkeypatch.setattr(first_run.library, "library_folder", missing)
    first_run.check_first_run()
    assert asked == []
