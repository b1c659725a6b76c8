"""The real command, in its own process, on the recall model and a document larger than the pool."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvflash_ggml.errors import LibraryError
from kvflash_ggml.native import library

REPO = Path(__file__).resolve().parents[2]
MODEL = REPO / "tests/models/recall-qwen3-q8_0.gguf"
TEXT = REPO / "tests/text/licences.txt"
FACT = "The access code for silver harbor is 4820917."
QUESTION = "What is the access code for silver harbor?"
SCRIPT = Path(sys.executable).with_name("kvflash-run")
COMMAND = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-m", "kvflash_ggml.cli"]


def installed() -> bool:
    try:
        library.library_folder()
    except LibraryError:
        return False
    return True


pytestmark = [
    pytest.mark.skipif(not installed(), reason="the native library is not installed"),
    pytest.mark.usefixtures("known_heads"),
]


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """About 3,500 tokens with the fact at the start: several times the pool."""
    path = tmp_path / "document.txt"
    path.write_text(f"{FACT}\n{TEXT.read_text(encoding='utf-8')[:12_000]}\n", encoding="utf-8")
    return path


def environment() -> dict[str, str]:
    """No option of whoever runs the tests; only where the library is, and retrieval heads."""
    kept = ("KVFLASH_LIB_PATH", "KVFLASH_HEADS")
    return {k: v for k, v in os.environ.items() if not k.startswith("KVFLASH_") or k in kept}


def kvflash_run(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(),
        check=False,
    )


def test_a_document_larger_than_the_pool(document: Path) -> None:
    done = kvflash_run(MODEL, "--kvflash", 1024, "--json", "--temp", 0, "-n", 32, "-f", document, "-p", QUESTION)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    pool = result["kvflash"]
    assert pool["pool"] == 1024
    assert pool["page_outs"] > 16
    assert pool["resident"] == 16 < pool["chunks"]
    assert pool["bytes_out"] > 0
    assert pool["host_bytes"] > 0
    assert result["usage"]["prompt_tokens"] > 2 * 1024
    assert result["timings"]["prompt_evaluated"] == result["usage"]["prompt_tokens"]
    assert 0 < result["usage"]["completion_tokens"] <= 32
    assert "4820917" in result["text"]  # the first chunk is a sink

    banner, closing = done.stderr.splitlines()
    assert banner.startswith("kvflash: pool 1024 of 131072 tokens")
    assert closing.startswith("kvflash: prompt ")
    assert f"resident 16/{pool['chunks']} chunks" in closing
    assert f"{pool['page_ins']} recalled, {pool['page_outs']} copied to the host" in closing


def test_a_pool_of_the_whole_context_answers_as_without(document: Path) -> None:
    line = [MODEL, "-c", 4608, "--temp", 0, "-n", 24, "-no-cnv", "-f", document, "-q"]
    plain, pooled = kvflash_run(*line), kvflash_run(*line, "--kvflash", 4608)
    assert plain.returncode == pooled.returncode == 0, plain.stderr + pooled.stderr
    assert plain.stdout == pooled.stdout != "\n"
    assert plain.stderr == pooled.stderr == ""


def test_a_pipe_in_and_out(document: Path) -> None:
    line = [MODEL, QUESTION, "--kvflash", 1024, "--temp", 0, "-n", 32]
    done = kvflash_run(*line, stdin=document.read_text())
    assert done.returncode == 0, done.stderr
    assert "4820917" in done.stdout
    assert "kvflash" not in done.stdout


def test_a_chat_reuses_what_it_has_read(document: Path) -> None:
    lines = f"/read {document}\n{QUESTION}\n/regen\n{QUESTION}\n/clear\nhello\n/stats\n"
    line = [MODEL, "-cnv", "--kvflash", 1024, "--temp", 0, "-n", 32, "-q"]
    done = kvflash_run(*line, stdin=lines)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("4820917") >= 2
    reused = kvflash_run(*line[:-1], stdin=lines)
    assert "more reused" in reused.stderr
    assert "Error" not in reused.stderr


def test_another_question_about_the_same_document_reads_only_the_question(document: Path, tmp_path: Path) -> None:
    path = tmp_path / "session.kvs"
    line = [MODEL, "--kvflash", 1024, "--json", "--temp", 0, "-n", 32, "-f", document, "--snapshot", path]
    done = kvflash_run(*line, "-p", "What is this text about?")
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)
    assert first["snapshot"]["restored"] is None
    assert first["snapshot"]["saved"]["bytes"] == path.stat().st_size

    again = kvflash_run(*line, "-p", QUESTION)
    assert again.returncode == 0, again.stderr
    second = json.loads(again.stdout)
    assert second["snapshot"]["restored"]["tokens"] == first["snapshot"]["saved"]["tokens"]
    assert second["timings"]["prompt_evaluated"] <= 64 < first["timings"]["prompt_evaluated"]
    assert "4820917" in second["text"]
    assert f"tokens from {path} in " in again.stderr


def test_a_snapshot_made_with_other_settings_is_refused_and_kept(document: Path, tmp_path: Path) -> None:
    path = tmp_path / "session.kvs"
    line = [MODEL, "--kvflash", 1024, "--temp", 0, "-n", 4, "-p", QUESTION, "--snapshot", path]
    assert kvflash_run(*line).returncode == 0
    before = path.read_bytes()
    other = kvflash_run(*line, "-ctk", "q8_0")
    assert (other.returncode, other.stdout) == (1, "")
    assert f"Error: {path} was saved with type_k = " in other.stderr
    assert path.read_bytes() == before


def test_the_same_seed_says_the_same() -> None:
    line = [MODEL, "-no-cnv", "Once", "-n", 24, "--temp", 1.5, "-q", "--seed"]
    first, second, other = kvflash_run(*line, 5), kvflash_run(*line, 5), kvflash_run(*line, 6)
    assert first.stdout == second.stdout != other.stdout


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        (["nowhere.gguf", "hi"], 1, "Error: Model path does not exist: nowhere.gguf\n"),
        (["nowhere.gguf", "--dry-run"], 1, "Error: Model path does not exist: nowhere.gguf\n"),
        ([MODEL, "hi", "--kvflash", "many"], 2, "'many' is not a number of tokens"),
        ([MODEL, "hi", "--kvflash", "1024", "-fa", "off"], 1, "flash attention"),
        ([MODEL, "word " * 600, "-c", "256"], 1, "exceed context window of 256: give a larger context with -c"),
        ([MODEL.parent, "hi"], 1, f"{MODEL.parent} is a folder: give one of its files, mtp-recall-"),
        ([TEXT, "hi"], 1, "is not a GGUF file, it begins with b'"),
    ],
)
def test_mistakes_are_told_plainly(line: list[str | Path], code: int, text: str) -> None:
    done = kvflash_run(*line)
    assert done.returncode == code
    assert done.stdout == ""
    assert text in done.stderr
    assert 'File "' not in done.stderr.split("Exception ignored")[0]


@pytest.mark.parametrize("layers", ["all", -1, 99])
def test_layers_on_a_machine_without_a_gpu(layers: int | str) -> None:
    if library.supports_gpu_offload() or library.machine_has_gpu():
        pytest.skip("there is a GPU")
    done = kvflash_run(MODEL, "hi", "-ngl", layers, "-n", 2)
    assert done.returncode == 0
    assert done.stderr.count("no GPU was found") == 1


def test_ctrl_c_stops_the_answer() -> None:
    line = [*COMMAND, MODEL, "Once upon a time", "-no-cnv", "--kvflash", "1024", "--temp", "0"]
    # English text, continued greedily, never ends for this model: the answer runs until it is stopped
    # a shell that starts tests in the background has all below it ignore SIGINT: undo that for the command
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        process = subprocess.Popen([*map(str, line)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], 120)
        assert ready, "no token within two minutes"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err.decode()
    assert out.endswith(b"\n")
    assert err.decode().rstrip().endswith("| interrupted")
    assert b"Traceback" not in err


@pytest.mark.parametrize("name", ["recall-qwen3-q8_0.gguf", "recall-qwen35-q8_0.gguf"])
def test_doctor(name: str) -> None:
    done = kvflash_run("doctor", MODEL.with_name(name), "--json")
    document = json.loads(done.stdout)
    assert document["ok"] is (done.returncode == 0)
    assert document["checks"]["decode"]["status"] == "ok", done.stdout
    about = document["checks"]["decode"]["about"]
    assert (about["n_ctx_train"], about["chat_template"], about["refused"]) == (131072, True, None)
    assert about["token_bytes"] > 0
    assert document["checks"]["decode"]["decode"]["page_outs"] > 0
    assert document["checks"]["decode"]["decode"]["page_ins"] > 0
    assert any(d["total"] > 0 for d in document["checks"]["devices"]["devices"])


def test_doctor_finds_a_broken_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLASH_LIB_PATH", str(tmp_path))
    done = kvflash_run("doctor", MODEL)
    assert done.returncode == 1
    assert f"KVFLASH_LIB_PATH={tmp_path}" in done.stdout
    assert "ERROR" in done.stdout


def test_doctor_with_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not a model")
    done = kvflash_run("doctor", tmp_path / "bad.gguf")
    assert done.returncode == 1
    assert "bad.gguf" in done.stdout


def test_version() -> None:
    done = kvflash_run("--version")
    assert done.returncode == 0
    assert "llama.cpp" in done.stdout
