"""doctor: what it says when the child works, fails, crashes or hangs."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.interrupter import elsewhere

from kvflash_ggml import pip_line
from kvflash_ggml.calibration.known import Calibration, HeadScore, heads_file, save
from kvflash_ggml.cli import child, main, probe
from kvflash_ggml.cli import doctor as checks
from kvflash_ggml.cli.child import Child
from kvflash_ggml.errors import LibraryError
from kvflash_ggml.native import trial
from kvflash_ggml.native.sizes import Needs
from kvflash_ggml.placement.sizes import Device
from kvflash_ggml.snapshot.fingerprint import ModelFile

INFO = {
    "version": "0.1.0",
    "llama_cpp_python": "0.3.36",
    "llama_cpp_commit": "0c1e57098bba",
    "ggml": "0.25.3",
    "sdist_sha256": "832db069",
    "patches": ["0001-pool.patch"],
    "patches_hash": "abcdef",
    "cmake_defines": {"GGML_NATIVE": "OFF"},
    "backends": ["cpu"],
}
DECODE = {
    "seconds": 0.1,
    "prompt": 960,
    "tokens": [1, 2, 3, 4],
    "page_outs": 15,
    "page_ins": 1,
    "paged": True,
    "refused": None,
}
SAID: dict[str, Any] = {
    "doing": "decode",
    "library": "/lib/here",
    "cpu": "libggml-cpu.so",
    "weights": {"CPU_REPACK": 5},
    "system": "CPU : AVX2 = 1",
    "devices": [{"name": "CPU", "description": "Some CPU", "free": 2 << 30, "total": 4 << 30}],
    "gpu": False,
    "decode": DECODE,
}


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks.library, "build_info", lambda: INFO)
    monkeypatch.setattr(checks.importlib.metadata, "version", lambda name: "0.3.36")
    monkeypatch.setattr(checks, "_NVIDIA_DRIVER", tmp_path / "none")
    say(monkeypatch, Child(said=SAID, doing="decode", failure=""))


def say(monkeypatch: pytest.MonkeyPatch, answer: Child) -> None:
    monkeypatch.setattr(checks, "run_child", lambda model, timeout: answer)


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments], prog_name="kvflash-run")


def test_what_a_model_would_take_is_said(healthy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"architecture": "qwen3", "n_ctx_train": 131072, "chat_template": True, "token_bytes": 3072}
    about["refused"] = None
    say(monkeypatch, Child(said={**SAID, "about": about}, doing="decode", failure=""))
    text = doctor("m.gguf").stdout
    assert "qwen3, trained for 131,072 tokens, a chat template" in text
    assert "a full f16 cache takes 384.0 MiB, a pool of 4,096 tokens 12.0 MiB and up to 384.0 MiB on the host" in text
    assert json.loads(doctor("m.gguf", "--json").stdout)["checks"]["decode"]["about"] == about
    refused = {**about, "chat_template": False, "refused": "no memory"}
    said = {**SAID, "about": refused, "decode": {**DECODE, "refused": "no memory"}}
    say(monkeypatch, Child(said=said, doing="decode", failure=""))
    text = doctor("m.gguf").stdout
    assert "no chat template" in text
    assert "works without a pool only: no memory" in text
    assert "can be pooled" not in text


def test_whether_the_heads_of_a_model_are_known_is_said(
    healthy: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = str(Path(__file__).parents[1] / "models/recall-qwen3-q8_0.gguf")
    monkeypatch.setenv("KVFLASH_HEADS", str(tmp_path))
    assert f"kvflash-run calibrate {model} finds them now" in doctor(model).stdout
    head = HeadScore(layer=1, head=0, found=1.0, control=0.0, first=1.0, chosen=True)
    identity = ModelFile(model).identity()
    save(Calibration(model=identity, questions=48, tokens=5000, heads=(head,)), heads_file(identity))
    assert "retrieval heads asked: 1" in doctor(model).stdout
    assert "calibrate" not in doctor("missing.gguf").stdout


def test_nothing_is_said_of_the_heads_of_a_model_that_does_not_load(
    healthy: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its file is not opened either: one that is a pipe would be waited for."""
    os.mkfifo(tmp_path / "pipe.gguf")
    say(monkeypatch, Child(said=SAID, doing="decode", failure="it is a pipe"))
    assert "calibrate" not in elsewhere(lambda: doctor(str(tmp_path / "pipe.gguf"))).stdout


def test_what_would_go_where_is_said_of_a_model_that_is_asked_for(
    healthy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_placement(failure: str = "", **found: Any) -> None:
        say(monkeypatch, Child(said={**SAID, "placement": found}, doing="placement", failure=failure))

    with_placement(fits=True, table="device  free", options=["-ngl", "7"])
    assert "device  free" in doctor("m.gguf").stdout
    assert "llama-cli -m m.gguf -ngl 7" in doctor("m.gguf").stdout
    assert "placement" not in doctor().stdout
    assert json.loads(doctor("m.gguf", "--json").stdout)["checks"]["placement"]["options"] == ["-ngl", "7"]
    with_placement(fits=False, why="CUDA0 has 1 MiB free")
    assert doctor("m.gguf").exit_code == 0
    assert "warning" in doctor("m.gguf").stdout
    with_placement(failure="crashed with SIGSEGV")
    assert doctor("m.gguf").exit_code == 1
    assert "kvflash-run m.gguf --dry-run" in doctor("m.gguf").stdout


def test_all_is_well(healthy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLASH_POOL", "1024")
    monkeypatch.setenv("LLAMA_ARG_API_KEY", "hidden")
    result = doctor("m.gguf")
    assert result.exit_code == 0
    for text in (
        "llama.cpp 0c1e57098bba, ggml 0.25.3, CPU",
        "sdist sha256 832db069",
        "1 patches, hash abcdef",
        "/lib/here",
        "libggml-cpu.so: CPU : AVX2 = 1",
        "CPU_REPACK: 5 types, as exact as plain ones",
        "Some CPU, 2.0 of 4.0 GiB free",
        "KVFLASH_POOL=1024",
        "pages: 15 out, 1 in",
        "everything works",
    ):
        assert text in result.stdout
    assert "hidden" not in result.stdout


def test_what_cpus_a_build_is_for(healthy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {None: "for CPUs with what its flags say", "native": "for CPUs like that of the build"}
    for flavour, text in {**said, "portable": "for any CPU: haswell, x64"}.items():
        info = {**INFO, "flavour": flavour, "cpu_variants": ["haswell", "x64"]}
        monkeypatch.setattr(checks.library, "build_info", lambda info=info: info)
        assert text in doctor("m.gguf").stdout


@pytest.mark.parametrize(("buffer", "build"), [("AMX", 'CFLAGS="-mno-amx-tile'), ("CPU_REPACK", None)])
def test_packed_weights_that_crash(
    healthy: None, monkeypatch: pytest.MonkeyPatch, buffer: str, build: str | None
) -> None:
    said = {**SAID, "buffer": buffer, "weights": None, "decode": None}
    say(monkeypatch, Child(said=said, doing="weights", failure="crashed with SIGSEGV", crashed=True))
    result = doctor("m.gguf")
    assert result.exit_code == 1
    assert f"ERROR   weights packed for this CPU, buffer type {buffer}: crashed with SIGSEGV" in result.stdout
    assert "--no-repack, or use_extra_bufts=False" in result.stdout
    assert ("CFLAGS" in result.stdout) == (build is not None)
    assert "decode             ERROR   not tried" in result.stdout


def test_json(healthy: None) -> None:
    document = json.loads(doctor("m.gguf", "--json").stdout)
    assert document["ok"] is True
    assert document["checks"]["build"]["build"] == INFO
    assert document["checks"]["decode"]["decode"] == DECODE
    assert document["checks"]["devices"]["devices"] == SAID["devices"]


@pytest.mark.parametrize(("name", "told"), [("Vulkan0", "between two steps"), ("ROCm1", "beside the compute")])
def test_a_backend_that_was_never_measured_is_told(
    name: str, told: str, healthy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [*SAID["devices"], {"name": name, "description": "Some GPU", "free": 1 << 30, "total": 1 << 30}]
    say(monkeypatch, Child(said={**SAID, "devices": devices, "gpu": True}, doing="decode", failure=""))
    text = " ".join(doctor("m.gguf").stdout.split())
    assert f"{name[:-1]}: never measured. A pool should work, and pages move" in text
    assert told in text


def test_what_vulkan_lacks_is_told(healthy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.library, "build_info", lambda: {**INFO, "backends": ["cpu", "vulkan"]})
    monkeypatch.setattr(checks.vulkan, "drivers", lambda: ["radeon_icd"])
    monkeypatch.setattr(checks.vulkan, "why_none", lambda: "no driver")
    document = json.loads(doctor("m.gguf", "--json").stdout)["checks"]["devices"]
    assert (document["status"], document["remedy"]) == ("warning", "no driver")
    assert "Vulkan drivers: radeon_icd" in document["detail"]
    say(monkeypatch, Child(said={**SAID, "gpu": True}, doing="decode", failure=""))
    assert "no driver" not in doctor("m.gguf").stdout


def test_without_a_model_one_is_made(healthy: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "_TEST_MODEL", tmp_path / "none.gguf")
    result = doctor()
    assert result.exit_code == 0
    assert "a tiny model of random weights" in result.stdout


CPU: dict[str, Any] = {"features": ["amx_int8"], "gpu": False}
CRASH = Child(said=CPU, doing="decode", failure="crashed with SIGSEGV", crashed=True)


@pytest.mark.parametrize(
    ("answer", "text", "remedy"),
    [
        (CRASH, "crashed with SIGSEGV: it uses AMX", 'CXXFLAGS="-mno-amx-int8" pip install'),
        (dataclasses.replace(CRASH, said={"gpu": True}), "crashed with SIGSEGV", "-v -ngl 0"),
        (Child(said=CPU, doing="decode", failure="KeyError"), "m.gguf: KeyError", "kvflash-run m.gguf -v -n 4"),
        (dataclasses.replace(CRASH, doing="library", said={}), "crashed with", 'DGGML_NATIVE=OFF" pip install'),
    ],
)
def test_the_remedy_fits_the_crash(
    healthy: None, monkeypatch: pytest.MonkeyPatch, answer: Child, text: str, remedy: str
) -> None:
    monkeypatch.setattr(trial, "cpu", lambda: {"flags": "amx_int8"})
    say(monkeypatch, dataclasses.replace(answer, said={"library": "", "cpu": "", "system": ""} | answer.said))
    result = doctor("m.gguf")
    assert result.exit_code == 1
    assert text in result.stdout
    assert remedy in result.stdout
    assert ("-ngl 0" in result.stdout) == ("-ngl 0" in remedy)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (Child(said={}, doing="library", failure="LibraryError: x is missing"), "x is missing"),
        (Child(said=SAID, doing="decode", failure="crashed with SIGSEGV"), "m.gguf: crashed with"),
        (Child(said=SAID | {"decode": DECODE | {"page_ins": 0}}, doing="decode", failure=""), ""),
    ],
)
def test_what_is_wrong_and_what_to_type(
    healthy: None, monkeypatch: pytest.MonkeyPatch, answer: Child, text: str
) -> None:
    say(monkeypatch, answer)
    result = doctor("m.gguf")
    assert result.exit_code == 1
    assert text in result.stdout
    assert "ERROR" in result.stdout
    assert "something is wrong" in result.stdout


def test_other_bindings(healthy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.importlib.metadata, "version", lambda name: "0.3.35")
    result = doctor("m.gguf")
    assert result.exit_code == 1
    assert "0.3.35; this build needs exactly 0.3.36" in result.stdout
    assert "pip install --no-cache-dir llama-cpp-python==0.3.36" in result.stdout


@pytest.mark.parametrize("own", [False, True])
def test_what_an_uninstall_would_leave_is_said(
    own: bool, healthy: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if own:
        (tmp_path / "lib").mkdir()
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    check = json.loads(doctor("m.gguf", "--json").stdout)["checks"]["llama-cpp-python"]
    assert check["own_library"] is own
    line = "after pip uninstall kvflash-ggml: pip install --force-reinstall --no-cache-dir llama-cpp-python==0.3.36"
    assert (line in check["detail"]) is not own


def test_nothing_is_built(healthy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def unbuilt() -> None:
        raise LibraryError("kvflash_ggml is not built")

    monkeypatch.setattr(checks.library, "build_info", unbuilt)
    failed = Child(said={}, doing="library", failure="LibraryError: kvflash_ggml is not built")
    say(monkeypatch, failed)
    result = doctor()
    assert result.exit_code == 1
    assert f"-> {pip_line.install()}" in result.stdout


def test_a_gpu_that_is_not_used(healthy: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM version: 550.1\nGCC\n")
    monkeypatch.setattr(checks, "_NVIDIA_DRIVER", driver)
    result = doctor("m.gguf")
    assert result.exit_code == 0
    assert "no GPU is used, though there is a driver: NVRM version: 550.1" in result.stdout
    assert "GGML_CUDA=on" in result.stdout


def test_a_model_that_cannot_be_pooled(healthy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = DECODE | {"refused": "architecture 'mamba'", "paged": False}
    say(monkeypatch, Child(said=SAID | {"decode": refused}, doing="decode", failure=""))
    result = doctor("m.gguf")
    assert result.exit_code == 0
    assert "works without a pool only: architecture 'mamba'" in result.stdout


def run_probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, timeout: float = 30) -> Child:
    """A real child process, whose probe is `body`."""
    (tmp_path / "stub_probe.py").write_text(f"def main(model):\n    {body}\n")
    monkeypatch.setattr(child.sys, "path", [str(tmp_path), *child.sys.path])
    return child.run_child(None, timeout=timeout, module="stub_probe")


def test_the_child_s_answers_are_collected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    body = """print('noise'); print('{"doing": "devices", "gpu": true}')"""
    answer = run_probe(monkeypatch, tmp_path, body)
    assert (answer.doing, answer.said["gpu"], answer.failure) == ("devices", True, "")


def test_a_crash_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    body = """print('{"doing": "decode"}', flush=True); import os; os.kill(os.getpid(), 11)"""
    answer = run_probe(monkeypatch, tmp_path, body)
    assert (answer.doing, answer.failure, answer.crashed) == ("decode", "crashed with SIGSEGV", True)


def test_an_exception_is_told_without_its_frames(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answer = run_probe(monkeypatch, tmp_path, "raise ValueError('one\\n  two')")
    assert (answer.doing, answer.failure) == ("start", "ValueError: one\n  two")


def test_a_child_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answer = run_probe(monkeypatch, tmp_path, "import time; time.sleep(60)", timeout=1)
    assert answer.failure == "no answer within 1 s"


# --- a whole step


def a_device(name: str, free: int) -> Device:
    return Device(name=name, kind="host" if name == "CPU" else "gpu", free=free, total=1 << 40)


def test_what_nobody_has_counted() -> None:
    before = [a_device("CUDA0", 1000), a_device("CUDA1", 1000), a_device("CPU", 1000)]
    after = [a_device("CUDA0", 100), a_device("CUDA1", 990), a_device("CPU", 0)]
    counted = [Needs(device=name, weights=size, kv=20, compute=3) for name, size in (("CUDA0", 400), ("CPU", 7))]
    (found,) = probe.lost(before, after, counted, {"CUDA0": 50})
    assert (found["name"], found["taken"], found["beyond"]) == ("CUDA0", 900, 900 - 473)
    assert found["margin"] == (1 << 40) // 50


@pytest.mark.parametrize(
    ("devices", "failure", "status", "told"),
    [
        ([], "", "ok", "nothing to tell"),
        ([{"name": "CUDA0", "taken": 3 << 30, "beyond": 60 << 20, "margin": 512 << 20}], "", "ok", "60 of them"),
        ([{"name": "CUDA0", "taken": 3 << 30, "beyond": 600 << 20, "margin": 512 << 20}], "", "warning", "600 of them"),
        ([], "crashed with SIGSEGV", "error", "SIGSEGV"),
    ],
)
def test_a_step(
    devices: list[dict[str, Any]], failure: str, status: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {} if failure else {"step": {"n_ubatch": 2048, "devices": devices}}
    answer = Child(said=said, doing="start", failure=failure)
    monkeypatch.setattr(checks, "run_child", lambda *args, **keywords: answer)
    check = checks.a_step("m.gguf", timeout=9)
    assert check.status == status
    assert told in check.detail
    assert ("-ub" in check.remedy) == (status == "warning")
