"""Whether a build runs here: what is made of a child that works, crashes or cannot try."""

from __future__ import annotations

import dataclasses
import functools
import threading
from pathlib import Path
from typing import Any

import pytest
from vendoring import build, toolchain
from vendoring.pin import VendorError

from kvflash_ggml.native import library, trial

AMX = 'CFLAGS="-mno-amx-int8" CXXFLAGS="-mno-amx-int8"'
PORTABLE = 'CMAKE_ARGS="$CMAKE_ARGS -DGGML_NATIVE=OFF"'


@pytest.fixture
def old_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "cpu", lambda: {"flags": "fpu avx avx2 fma", "model name": "Old"})


def child(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> tuple[bool, str]:
    script = folder / "child.py"
    script.write_text(f"import json, os, sys\nsay = lambda **said: print(json.dumps(said), flush=True)\n{body}\n")
    monkeypatch.setattr(trial, "__file__", str(script))
    return trial.attempt([folder / "libllama.so"])


def test_a_crash_names_the_signal_the_feature_and_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trial, "cpu", lambda: {"flags": "avx amx_int8"})
    fine, text = child(monkeypatch, tmp_path, "say(features=['avx', 'amx_int8']); os.kill(os.getpid(), 11)")
    assert not fine
    assert "crashes with SIGSEGV: it uses AMX" in text
    assert AMX in text


def test_what_the_child_could_not_try_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert child(monkeypatch, tmp_path, "say(skipped='no driver')") == (True, "not tried: no driver")


def test_an_error_of_the_child_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert child(monkeypatch, tmp_path, "sys.exit('llama_decode returned -3')") == (False, "llama_decode returned -3")
    assert child(monkeypatch, tmp_path, "sys.exit(7)") == (False, "exit code 7")


def test_a_child_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trial, "SECONDS", 1)
    assert child(monkeypatch, tmp_path, "import time; time.sleep(60)") == (False, "no answer within 1 s")


def test_features_that_the_cpu_lacks_come_first(old_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trial.missing(["avx2", "avx512", "amx_int8"]) == ["AVX512", "AMX_INT8"]
    assert trial.explain(["avx512", "amx_int8"]) == (
        "it was built for AVX512, AMX_INT8, which this CPU does not have",
        PORTABLE,
    )
    assert trial.explain(["avx2"]) == ("", PORTABLE)
    monkeypatch.setattr(trial, "cpu", dict)
    assert trial.missing(["avx512"]) == []


def test_libraries_are_loaded_after_those_they_need() -> None:
    names = ["libllama.so", "libggml.so", "libggml-cuda.so", "libother.so", "libggml-cpu.so", "libggml-base.so"]
    assert [path.name for path in trial.load_order(map(Path, names))] == [
        "libggml-base.so", "libggml-cpu.so", "libggml-cuda.so", "libggml.so", "libllama.so",
    ]  # fmt: skip


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 4)", "sys.exit('q4_K: off by 1')"])
def test_packed_weights_that_fail_name_their_buffer_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: str
) -> None:
    fine, text = child(monkeypatch, tmp_path, f"say(features=['amx_int8']); say(buffer='AMX'); {end}")
    assert not fine
    assert "weights packed for this CPU, buffer type AMX\nBuild it again with CFLAGS=" in text
    assert "--no-repack, or use_extra_bufts=False of Llama" in text
    assert ("crashes with SIGILL: weights" in text) == ("kill" in end)
    fine, text = child(monkeypatch, tmp_path, f"say(buffer='AMX'); say(buffer=None); {end}")
    assert not fine
    assert "packed" not in text


PORTABLE_FILES = [
    "libllama.so",
    "libggml-cpu-x64.so",
    "libggml.so",
    "libggml-cuda.so",
    "libggml-cpu-zen4.so",
    "libggml-base.so",
]


def test_ggml_opens_the_backends_of_a_portable_build() -> None:
    files = [Path("lib", name) for name in PORTABLE_FILES]
    assert [file.name for file in trial.to_open(files)] == ["libggml-base.so", "libggml.so", "libllama.so"]
    assert [file.name for file in trial.cpu_variants(files)] == ["libggml-cpu-x64.so", "libggml-cpu-zen4.so"]
    native = [Path("lib", name) for name in ("libllama.so", "libggml-cpu.so", "libggml.so", "libggml-base.so")]
    assert trial.to_open(native) == trial.load_order(native)
    assert trial.cpu_variants(native) == []
    assert [file.name for file in trial.device_backends(files)] == ["libggml-cuda.so"]
    assert trial.device_backends([*native, Path("lib", "libggml-cuda.so")]) == []


@pytest.mark.parametrize(("gpu", "level"), [(True, "WARNING"), (False, "DEBUG")])
def test_a_portable_build_does_without_a_backend_that_does_not_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gpu: bool, level: str
) -> None:
    monkeypatch.setattr(library, "machine_has_gpu", lambda: gpu)
    caplog.set_level("DEBUG", "kvflash_ggml")
    for name in PORTABLE_FILES:
        (tmp_path / name).write_text("no library")
    library.open_device_backends(tmp_path.iterdir())
    (said,) = caplog.records
    assert said.levelname == level
    assert "libggml-cuda.so could not be loaded" in said.message


class Ggml:
    """The part of ggml that loads backends. loads: how many it finds."""

    def __init__(self, loads: int) -> None:
        self.folders: list[bytes] = []
        self._count = 0
        self.ggml_backend_reg_count: Any = lambda: self._count
        self.ggml_backend_load_all_from_path: Any = functools.partial(self._load, loads)
        self.ggml_log_get = self.ggml_log_set = lambda log, data: None

    def _load(self, loads: int, folder: bytes) -> None:
        self.folders.append(folder)
        self._count += loads


def test_backends_are_loaded_once_and_from_the_folder_of_the_build() -> None:
    ggml: Any = Ggml(1)
    for _ in range(2):
        trial.load_backends(ggml, [Path("here", name) for name in PORTABLE_FILES])
    assert ggml.folders == [b"here"]
    trial.load_backends(native := Ggml(0), [Path("here/libggml-cpu.so")])  # type: ignore[arg-type]
    assert native.folders == []
    with pytest.raises(OSError, match=r"none of the CPU backends in here \(libggml-cpu-x64\.so, "):
        trial.load_backends(Ggml(0), [Path("here", name) for name in PORTABLE_FILES])  # type: ignore[arg-type]


def test_backends_are_loaded_once_by_threads() -> None:
    again = threading.Event()

    class Slow(Ggml):
        def _load(self, loads: int, folder: bytes) -> None:
            if self.folders:
                again.set()
            self.folders.append(folder)
            again.wait(0.2)
            self._count += loads

    ggml: Any = Slow(1)
    files = [Path("here", name) for name in PORTABLE_FILES]
    threads = [threading.Thread(target=trial.load_backends, args=(ggml, files)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ggml.folders == [b"here"]


# --- at the end of a build


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> build.Plan:
    """A build whose compiler is a stub, and whose self-check is the script `native/trial.py`."""

    def make(made_with: toolchain.Toolchain, work: Path, target: str) -> None:
        (work / "bin").mkdir(parents=True, exist_ok=True)
        (work / "bin" / "libllama.so").touch()

    monkeypatch.setattr(build, "_sync_sources", lambda p: 0)
    monkeypatch.setattr(build, "_configure_llama", lambda p: None)
    monkeypatch.setattr(build, "make", make)
    monkeypatch.setattr(build, "NATIVE", tmp_path / "native")
    (tmp_path / "native").mkdir()
    (tmp_path / "ggml" / "lib").mkdir(parents=True)
    unused: dict[str, Any] = dict.fromkeys(("pin", "source"))
    return build.Plan(
        toolchain=toolchain.Toolchain(), series=(), developer=False,
        ggml=tmp_path / "ggml", work=tmp_path / "work", out=tmp_path / "out", **unused,
    )  # fmt: skip


def _says(plan: build.Plan, text: str, status: int) -> None:
    (build.NATIVE / "trial.py").write_text(f"import sys; print({text!r}); sys.exit({status})")


def test_only_a_build_that_runs_is_kept(plan: build.Plan, capsys: pytest.CaptureFixture[str]) -> None:
    _says(plan, "it crashes with SIGSEGV", 1)
    with pytest.raises(VendorError, match="do not work on this machine:\nit crashes with SIGSEGV"):
        build._build_llama(plan)
    assert not plan.out.exists()
    _says(plan, "a model was decoded", 0)
    build._build_llama(plan)
    assert [path.name for path in plan.out.iterdir()] == ["libllama.so"]
    assert "self-check: a model was decoded" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["CMAKE_TOOLCHAIN_FILE", "CMAKE_SYSTEM_NAME"])
def test_a_cross_build_is_not_tried(plan: build.Plan, name: str) -> None:
    _says(plan, "it crashes", 1)
    build._build_llama(dataclasses.replace(plan, toolchain=toolchain.Toolchain(defines={name: "x"})))
    assert plan.out.is_dir()
