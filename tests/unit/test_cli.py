"""`kvflash-run MODEL [PROMPT]` and the chat, with a model made of ten lines of Python."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_llama import BANNER, REPLY, FakeLlama, Stage, interrupt_at, staged, stats

from kvflash_ggml import logs, system
from kvflash_ggml.cli import chat, model, prompt, report, run
from kvflash_ggml.cli.options import SamplingOptions
from kvflash_ggml.config import Fit, KVFlashConfig, PrefixCache
from kvflash_ggml.errors import ConfigError, ContextFull, LibraryError
from kvflash_ggml.sampling import Samplers
from kvflash_ggml.settings import settings


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    yield from staged(monkeypatch)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stdin is a terminal, stdout is not."""
    for module in (run, chat, prompt):
        monkeypatch.setattr(module, "stdin_is_terminal", lambda: True)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str = REPLY) -> dict[str, str]:
    return {"role": "assistant", "content": text}


# --- what goes where


@pytest.mark.parametrize(("every", "told"), [(None, False), (1, False), (8, True)])
def test_scores_that_are_far_apart_are_told(cli: Stage, every: int | None, told: bool, monkeypatch: Any) -> None:
    made = stats()
    made.scored_every = every
    monkeypatch.setattr("support.fake_llama.stats", lambda: made)
    assert ("scored every 8 tokens" in cli("m.gguf", "hi", "--kvflash", "1024").stderr) == told


def test_stdout_has_the_answer_and_nothing_else(cli: Stage) -> None:
    result = cli("m.gguf", "hello", "--kvflash", "1024")
    assert (result.exit_code, result.stdout) == (0, REPLY + "\n")
    banner, closing = result.stderr.splitlines()
    assert banner == BANNER
    assert closing.startswith("kvflash: prompt 5 tokens, ")
    assert "| generation 9 tokens, " in closing
    assert closing.endswith("t/s | resident 16/84 chunks | 3 recalled, 83 copied to the host | read exactly")
    assert cli.made[0].closed


@pytest.mark.parametrize("chatting", [False, True])
def test_a_warning_comes_after_the_answer(cli: Stage, chatting: bool) -> None:
    """On a terminal, which shows both streams, it would cut the answer in two."""
    ask = {"stdin": "hello\n"} if chatting else {}

    def warn(count: int) -> None:
        if count == 3:
            logging.getLogger(logs.NAME).warning("full")

    result = cli("m.gguf", *(["-cnv"] if chatting else ["hello"]), on_token=warn, **ask)
    assert REPLY in result.output
    assert "kvflash: warning: full\n" in result.stderr


def test_without_a_pool_there_is_no_banner(cli: Stage) -> None:
    result = cli("m.gguf", "hello")
    assert cli.settings["kvflash"] is None
    assert len(result.stderr.splitlines()) == 1
    assert "resident" not in result.stderr


def test_quiet_says_nothing_on_stderr(cli: Stage) -> None:
    result = cli("m.gguf", "hello", "--kvflash", "1024", "-q")
    assert (result.stdout, result.stderr) == (REPLY + "\n", "")


def test_no_stream_prints_the_same_at_the_end(cli: Stage) -> None:
    assert cli("m.gguf", "hello", "--no-stream").stdout == REPLY + "\n"


def test_a_trailing_newline_is_not_doubled(cli: Stage) -> None:
    assert cli("m.gguf", "hello", replies=["one\n"]).stdout == "one\n"


def test_progress_is_only_drawn_on_a_terminal(cli: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "reading" not in cli("m.gguf", "hello").stderr
    monkeypatch.setattr(run, "stderr_is_terminal", lambda: True)
    shown = cli("m.gguf", "hello")
    assert "reading the prompt:  20% of 5 tokens" in shown.stderr
    assert shown.stdout == REPLY + "\n"
    assert "reading" not in cli("m.gguf", "hello", "-q").stderr


def test_json_is_one_document(cli: Stage) -> None:
    result = cli("m.gguf", "hello", "--kvflash", "1024", "--json", "--seed", "7")
    document = json.loads(result.stdout)
    assert document["text"] == REPLY
    assert document["finish_reason"] == "stop"
    assert document["seed"] == 7
    assert document["usage"] == {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14}
    assert document["timings"]["prompt_evaluated"] == 5
    assert document["kvflash"]["page_outs"] == 83
    assert result.stderr.startswith(BANNER)
    assert json.loads(cli("m.gguf", "hello", "--json").stdout)["kvflash"] is None


# --- options


def test_options_reach_the_model(cli: Stage) -> None:
    line = "-m m.gguf -p hi -c 8192 -b 256 -ub 128 -ngl 99 -t 3 -ctk q8_0 -ctv q4_0 -fa on -nr"
    assert cli(*line.split()).exit_code == 0
    assert cli.settings == {
        "model_path": "m.gguf",
        "n_ctx": 8192,
        "n_batch": 256,
        "n_ubatch": 128,
        "n_gpu_layers": 99,
        "n_threads": 3,
        "n_threads_batch": 3,
        "type_k": 8,
        "type_v": 2,
        "flash_attn": True,
        "use_extra_bufts": False,
        "kvflash": None,
        "verbose": False,
    }


def test_a_dry_run_loads_nothing(cli: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    found: dict[str, Any] = {"fits": True, "table": "device  free", "options": ["-ot", "(0|1)=CPU"]}

    def predicted(path: str, settings: dict[str, Any]) -> dict[str, Any]:
        asked.append((path, settings))
        return found

    monkeypatch.setattr(report, "predicted", predicted)
    result = cli("m.gguf", "--dry-run", "--kvflash", "4096", "-c", "8192", "-ot", "exps=CPU")
    assert result.exit_code == 0
    assert result.stdout == "device  free\nllama.cpp, with a full cache: llama-cli -m m.gguf -ot '(0|1)=CPU'\n"
    (path, settings), made = asked[0], cli.made
    assert (path, settings["n_ctx"], settings["kvflash"].pool) == ("m.gguf", 8192, 4096)
    assert settings["override_tensor"] == [("exps", "CPU")]
    assert not made
    found = {"fits": False, "device": "CUDA0", "why": "CUDA0 has 1 MiB free"}
    result = cli("m.gguf", "--dry-run")
    assert (result.exit_code, result.stdout) == (3, "does not fit: CUDA0 has 1 MiB free\n")
    assert json.loads(cli("m.gguf", "--dry-run", "--json").stdout) == {"model": "m.gguf", **found}


def test_defaults_leave_batches_and_threads_to_the_library(cli: Stage) -> None:
    cli("m.gguf", "hi")
    assert {"n_batch", "n_ubatch", "n_threads", "use_extra_bufts"}.isdisjoint(cli.settings)
    assert (cli.settings["n_ctx"], cli.settings["n_gpu_layers"]) == (0, 0)


def test_all_layers_when_there_is_a_gpu_and_nothing_is_fitted(cli: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "supports_gpu_offload", lambda: True)
    cli("m.gguf", "hi", "--no-fit")
    assert cli.settings["n_gpu_layers"] == -1
    assert "fit" not in cli.settings


def test_fit_takes_llama_cpps_words(cli: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "supports_gpu_offload", lambda: True)
    for name in ("-fit", "--fit"):
        assert cli("-m", "m.gguf", name, "off", "hi").exit_code == 0
        assert "fit" not in cli.settings
        assert cli("-m", "m.gguf", "-ngl", "5", name, "on", "-p", "off").exit_code == 0
        assert cli.settings["fit"] == Fit()
        assert cli.request == [user("off")]
    assert cli("--color", "auto", "--color", "off", "--color", "m.gguf", "hi").exit_code == 0
    assert "the prompt is empty" in cli("m.gguf", "--color", "").stderr


def test_threads_below_one_are_all_cores(cli: Stage) -> None:
    cli("m.gguf", "hi", "-t", "-1", "-tb", "0")
    assert cli.settings["n_threads"] == cli.settings["n_threads_batch"] == system.cores()
    cli("m.gguf", "hi", "-t", "-1", "-tb", "2")
    assert (cli.settings["n_threads"], cli.settings["n_threads_batch"]) == (system.cores(), 2)


def test_with_a_gpu_what_is_not_given_is_fitted(cli: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "supports_gpu_offload", lambda: True)
    monkeypatch.setattr(model, "ensure_gpu_offload", lambda layers: None)
    cli("m.gguf", "hi")
    assert cli.settings["fit"] == Fit()
    assert {"n_gpu_layers", "type_k", "type_v", "n_ubatch"}.isdisjoint(cli.settings)
    cli("m.gguf", "hi", "-ngl", "20")
    assert cli.settings["n_gpu_layers"] == 20
    assert "fit" not in cli.settings
    cli("m.gguf", "hi", "-ngl", "20", "--fit", "-ctk", "q8_0")
    assert (cli.settings["n_gpu_layers"], cli.settings["type_k"], cli.settings["fit"]) == (20, 8, Fit())
    cli("m.gguf", "hi", "-sm", "row")
    assert cli.settings["n_gpu_layers"] == -1


def test_without_a_gpu_fitting_is_asked_for(cli: Stage) -> None:
    cli("m.gguf", "hi", "-fitt", "1024")
    assert cli.settings["fit"] == Fit(margin=1 << 30)
    for nothing in (["--no-fit"], ["-sm", "row"]):
        result = cli("m.gguf", "hi", "-fitt", "1024", *nothing)
        assert result.exit_code == 2
        assert "nothing is fitted" in result.output
    cli("m.gguf", "hi", "--fit", "-fitt", "CUDA0=1024,CPU=10")
    assert cli.settings["fit"] == Fit(margin={"CUDA0": 1 << 30, "CPU": 10 << 20})
    assert "n_gpu_layers" not in cli.settings
    cli("m.gguf", "hi", "--device-memory", "CUDA0=24G,CPU=1G", "-ngl", "7")
    assert cli.settings["fit"] == Fit(free={"CUDA0": 24 << 30, "CPU": 1 << 30})
    assert cli.settings["n_gpu_layers"] == 7
    assert "nothing is fitted" in cli("m.gguf", "hi", "--device-memory", "CUDA0=24G", "--no-fit").output
    for wrong in ("24G", "CUDA0", "=24G", "CUDA0=x", "CUDA0=1,CUDA0=2", ""):
        assert cli("m.gguf", "hi", f"--device-memory={wrong}").exit_code == 2, wrong
    for wrong in ("1,2", "CUDA0=x", "CUDA0=1,2", "-1", "=5"):
        result = cli("m.gguf", "hi", f"--fit-target={wrong}")
        assert result.exit_code == 2, wrong


def test_a_first_run_tries_what_the_run_will_use(cli: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(model, "check_first_run", lambda *, repack: seen.append(repack))
    cli("m.gguf", "hi")
    cli("m.gguf", "hi", "--no-repack")
    monkeypatch.setenv("KVFLASH_REPACK", "0")
    cli("m.gguf", "hi")
    assert seen == [True, False, False]


def test_layers_without_a_gpu_are_an_error(cli: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(layers: int) -> None:
        raise LibraryError('no GPU. Rebuild: CMAKE_ARGS="-DGGML_CUDA=on"')

    monkeypatch.setattr(model, "ensure_gpu_offload", refuse)
    result = cli("m.gguf", "hi", "-ngl", "all")
    assert result.exit_code == 1
    assert "GGML_CUDA=on" in result.stderr
    assert "-ngl 0" in result.stderr
    assert not cli.made


def test_pool_options(cli: Stage, tmp_path: Path) -> None:
    line = f"m.gguf hi --kvflash 4096 --kvflash-policy lru --kvflash-tau 32 --kvflash-pin 0:512 \
        --kvflash-pin 600:700 --kvflash-host-limit 8G --kvflash-spill {tmp_path} --kvflash-calibrate h.json \
        --kvflash-deterministic"
    assert cli(*line.split()).exit_code == 0
    assert cli.settings["kvflash"] == KVFlashConfig(
        pool=4096,
        policy="lru",
        tau=32,
        calibrate=Path("h.json"),
        deterministic=True,
        pins=((0, 512), (600, 700)),
        host_limit=8 << 30,
        spill=tmp_path,
    )
    for text, config in (
        ("auto", KVFlashConfig(pool="auto")),
        ("4k", KVFlashConfig(pool=4096)),
        ("1.5K", KVFlashConfig(pool=1536)),
        ("2G", KVFlashConfig(pool_bytes=2 << 30)),
        ("64kB", KVFlashConfig(pool_bytes=64 << 10)),
        ("9000000b", KVFlashConfig(pool_bytes=9_000_000)),
    ):
        cli("m.gguf", "hi", "--kvflash", text)
        assert cli.settings["kvflash"] == config


def test_a_prefix_cache(cli: Stage, tmp_path: Path) -> None:
    cli("m.gguf", "hi", "--kvflash", "4096")
    assert "kvflash_cache" not in cli.settings
    cli("m.gguf", "hi", "--kvflash", "4096", "--kvflash-cache", str(tmp_path))
    assert cli.settings["kvflash_cache"] == PrefixCache(folder=tmp_path)
    cli("m.gguf", "hi", "--kvflash", "4096", "--kvflash-cache", str(tmp_path), "--kvflash-cache-size", "2G")
    assert cli.settings["kvflash_cache"] == PrefixCache(folder=tmp_path, disk_bytes=2 << 30)
    result = cli("m.gguf", "hi", "--kvflash-cache", str(tmp_path))
    assert (result.exit_code, "--kvflash-cache needs a pool" in result.stderr) == (2, True)


# --- the report of residency


def test_a_report_is_written_at_the_end(cli: Stage, tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    result = cli("folder/m.gguf", "hi", "--kvflash", "1024", "--kvflash-report", str(path))
    assert (result.exit_code, result.stdout) == (0, REPLY + "\n")
    assert "<h1>m.gguf</h1>" in path.read_text()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ContextFull("too long"), KeyboardInterrupt()])
def test_a_report_is_written_of_a_run_that_failed(cli: Stage, tmp_path: Path, error: Any) -> None:
    path = tmp_path / "out.html"
    assert cli("m.gguf", "hi", "--kvflash", "1024", "--kvflash-report", str(path), error=error).exit_code != 0
    assert path.exists()


def test_a_report_of_a_chat(cli: Stage, tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    result = cli("m.gguf", "-cnv", "--kvflash", "1024", "--kvflash-report", str(path), stdin="hello\n")
    assert result.exit_code == 0
    assert path.exists()


@pytest.mark.parametrize("name", ["missing/out.html", "."])
def test_a_report_that_cannot_be_written_stops_the_run_before_it_begins(
    cli: Stage, tmp_path: Path, name: str
) -> None:  # fmt: skip
    result = cli("m.gguf", "hi", "--kvflash", "1024", "--kvflash-report", str(tmp_path / name))
    assert result.exit_code in (1, 2)
    assert str(tmp_path / name) in result.stderr.replace("\n", "")
    assert not cli.made


def test_without_a_pool_a_report_of_the_environment_is_ignored(
    cli: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFLASH_REPORT", str(tmp_path / "missing" / "out.html"))
    assert cli("m.gguf", "hi").exit_code == 0


def test_attention_that_missed_the_pool_is_told(cli: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = stats()
    usual.evicted_mass = 0.304
    monkeypatch.setattr("support.fake_llama.stats", lambda: usual)
    result = cli("m.gguf", "hi", "--kvflash", "1024", "--json")
    assert json.loads(result.stdout)["kvflash"]["evicted_mass"] == 0.304


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--kvflash many", "'many' is not a number of tokens (4096, 4K), a size (512M, 2G), 'auto' or 'off'"),
        ("--kvflash 0", "not a number of tokens"),
        ("--kvflash -5", "not a number of tokens"),
        ("--kvflash 1024 --kvflash-pin 5", "not a range"),
        ("--kvflash 1024 --kvflash-pin 9:5", "not a range"),
        ("--kvflash 1024 --kvflash-host-limit lots", "not a size"),
        ("--kvflash-tau 32", "--kvflash-tau needs a pool"),
        ("--kvflash-spec auto", "--kvflash-spec needs a pool"),
        ("--kvflash-answer lossless", "--kvflash-answer needs a pool"),
        ("--spec-draft-n-max 3", "--spec-draft-n-max needs a pool"),
        ("--kvflash-host-limit 1G", "--kvflash-host-limit needs a pool"),
        ("--kvflash-report out.html", "--kvflash-report needs a pool"),
        ("-ngl some", "not a number of layers"),
        ("-ctk q9_9", "q9_9"),
        ("-n 0", "not a number of tokens (-1: no limit)"),
        ("-p again", "given twice"),
        ("two prompts", "one prompt is expected"),
        ("-no-cnv -s be-brief", "leave out -no-cnv"),
        ("-f missing.txt", "missing.txt"),
        ("--wat", "--wat"),
        ("-sbe-brief -syst", "No such option '-syst'"),
        ("-st", "-st is llama.cpp's"),
        ("-sysf rules.txt", '--system "$(cat FILE)"'),
        ("--grammar root", "each request to kvflash-run serve says it"),
    ],
)
def test_wrong_usage_exits_2(cli: Stage, line: str, message: str) -> None:
    result = cli("m.gguf", "hi", *line.split())
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert not cli.made


def test_sampling_options(cli: Stage) -> None:
    line = "-n 5 --temp 0 --top-k 1 --top-p 0.5 --min-p 0 --repeat-penalty 1.1 --seed 3"
    assert cli("m.gguf", "hi", *line.split()).exit_code == 0
    samplers = cli.sampling.pop("samplers")
    assert cli.sampling == {"stream": True, "max_tokens": 5, "seed": 3}
    usual = SamplingOptions(temperature=0, top_k=1, top_p=0.5, min_p=0, repeat_penalty=1.1, max_tokens=5, seed=3)
    assert samplers == usual


def test_samplers_of_llama_cpp_by_its_flags(cli: Stage) -> None:
    line = """--typical 0.9 --top-nsigma 2 --mirostat 2 --mirostat-ent 4 --mirostat-lr 0.2 --dry-multiplier 0.8
        --dry-base 2 --dry-allowed-length 3 --dry-penalty-last-n -1 --dry-sequence-breaker \\n --dry-sequence-breaker ;
        --min-tokens 5 --xtc-probability 0.5 --xtc-threshold 0.2 --dynatemp-range 0.3 --dynatemp-exp 1.5
        --repeat-last-n 9 --adaptive-target 0.4 --adaptive-decay 0.5
        --presence-penalty 0.1 --frequency-penalty 0.2 --samplers dry;top-k;temp"""
    result = cli("m.gguf", "hi", *line.split())
    assert result.exit_code == 0, result.output
    found = {name: getattr(cli.sampling["samplers"], name) for name in settings(Samplers)}
    assert found == {
        "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "typical_p": 0.9, "top_n_sigma": 2,
        "mirostat": 2, "mirostat_tau": 4, "mirostat_eta": 0.2, "dry_multiplier": 0.8, "dry_base": 2,
        "dry_allowed_length": 3, "dry_penalty_last_n": -1, "dry_sequence_breakers": ("\n", ";"), "min_tokens": 5,
        "xtc_probability": 0.5, "xtc_threshold": 0.2, "dynatemp_range": 0.3, "dynatemp_exponent": 1.5,
        "repeat_penalty": 1, "repeat_last_n": 9, "presence_penalty": 0.1, "frequency_penalty": 0.2,
        "adaptive_target": 0.4, "adaptive_decay": 0.5,
        "samplers": ("dry", "top_k", "temperature"),
    }  # fmt: skip
    cli("m.gguf", "hi", "--sampling-seq", "kt", "--dry-sequence-breaker", "none")
    assert cli.sampling["samplers"].samplers == ("top_k", "temperature")
    assert cli.sampling["samplers"].breakers == ()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--samplers top_k;tfs_z", "'tfs_z' is no sampler: there are penalties;dry;"),
        ("--samplers top_k;top_k", "each can be there once"),
        (f"--dry-sequence-breaker {'x' * 41}", "has 41 bytes: give 1 to 40 bytes"),
        ("--mirostat 3", "3 is not in the range 0<=x<=2"),
        ("--repeat-last-n -2", "-2 is not in the range"),
        ("--xtc-probability 1.1", "1.1 is not in the range 0<=x<=1"),
    ],
)
def test_samplers_that_cannot_work(cli: Stage, line: str, message: str) -> None:
    result = cli("m.gguf", "hi", *line.split())
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
    assert not cli.made


def test_seeds_are_random_unless_given(cli: Stage) -> None:
    seeds = set()
    for _ in range(3):
        cli("m.gguf", "hi")
        seeds.add(cli.sampling["seed"])
    assert len(seeds) == 3


def test_environment_variables(cli: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLASH_MODEL", "env.gguf")
    monkeypatch.setenv("KVFLASH_POOL", "2048")
    monkeypatch.setenv("KVFLASH_TAU", "16")
    monkeypatch.setenv("KVFLASH_CTX_SIZE", "4096")
    cli("-p", "hi")
    assert cli.settings["model_path"] == "env.gguf"
    assert cli.settings["n_ctx"] == 4096
    assert cli.settings["kvflash"] == KVFlashConfig(pool=2048, tau=16)
    assert cli("-p", "hi", "--kvflash", "off").exit_code == 0  # the variable does not make it wrong
    assert cli.settings["kvflash"] is None


# --- the prompt


def test_the_verb_may_be_left_out(cli: Stage) -> None:
    for line in ("m.gguf hi", "run m.gguf hi", "-m m.gguf hi", "-c 0 m.gguf hi", "m.gguf -p hi"):
        assert cli(*line.split()).stdout == REPLY + "\n", line
        assert cli.request == [user("hi")]
        assert cli.settings["model_path"] == "m.gguf"


def test_document_then_question(cli: Stage, tmp_path: Path) -> None:
    document = tmp_path / "book.txt"
    document.write_text("a document\n")
    cli("m.gguf", "-f", str(document), "-p", "a question", stdin="left alone")
    assert cli.request == [user("a document\na question")]
    other = tmp_path / "other.txt"
    other.write_text("more of it")
    cli("m.gguf", "-f", str(other), "-f", "-", "-f", str(document), "-p", "a question", stdin="piped")
    assert cli.request == [user("more of it\npiped\na document\na question")]
    twice = cli("m.gguf", "-f", "-", "-f", "-", "-p", "a question", stdin="piped")
    assert (twice.exit_code, "give -f - once" in twice.stderr) == (2, True)
    cli("m.gguf", "a question", stdin="a document")
    assert cli.request == [user("a document\na question")]
    cli("m.gguf", "-f", "-", "-p", "a question", stdin="a document")
    assert cli.request == [user("a document\na question")]
    cli("m.gguf", "-p", "a question", stdin="left alone")
    assert cli.request == [user("a question")]
    cli("m.gguf", stdin="only this\n")
    assert cli.request == [user("only this")]


def test_no_prompt_at_all(cli: Stage) -> None:
    assert cli("m.gguf").exit_code == 2
    assert cli("m.gguf", "  ").exit_code == 2
    assert "which model?" in cli("-p", "hi").stderr


def test_a_text_without_an_end(cli: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As /dev/zero, which would take all memory."""
    file = tmp_path / "x"
    file.write_bytes(b"x" * ((1 << 20) + 1))
    for name in ("MOST_TEXT", "MOST_MEDIA"):
        monkeypatch.setattr(prompt, name, 1 << 20)
    for ask, stdin in (
        (["-f", file], ""),
        (["hi"], file.read_text()),
        (["hi", "--image", file, "--mmproj", file], ""),
        (["-cnv"], f"/read {file}\n"),
        (["-cnv", "--mmproj", file], f"/image {file}\nhi\n"),
    ):
        result = cli("m.gguf", *ask, stdin=stdin)
        name = "stdin" if ask == ["hi"] else file
        assert f"{name} has more than 1 MiB, and no more is read: give a smaller file" in result.stderr
        assert not cli.made or not cli.made[-1].requests
    file.write_bytes(b"x\r\n" + b"y\r" * 9)
    cli("m.gguf", "-f", file)
    assert cli.request == [user("x\n" + "y\n" * 8 + "y")]


def test_a_file_that_is_not_text(cli: Stage, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"ab\xff")
    result = cli("m.gguf", "-f", str(tmp_path / "x"))
    assert result.exit_code == 1
    assert "not UTF-8 text (byte 2)" in result.stderr


def test_system_message(cli: Stage) -> None:
    cli("m.gguf", "hi", "-s", "be brief")
    assert cli.request == [{"role": "system", "content": "be brief"}, user("hi")]


def test_the_value_of_an_option_may_look_like_one(cli: Stage) -> None:
    assert "given twice" in cli("m.gguf", "-p", "-st", "-qv", "--", "-phi").stderr
    assert cli("m.gguf", "-p", "-st", "-n5", "--system", "-phi", "--color", "on").exit_code == 0
    assert cli.request == [{"role": "system", "content": "-phi"}, user("-st")]


def test_a_seed_of_llama_cli_is_told_from_a_system_message(cli: Stage) -> None:
    assert "--seed 42 sets the seed" in cli("m.gguf", "hi", "-s", "42").stderr
    assert "--seed" not in cli("m.gguf", "hi", "-s", "be brief").stderr


def test_raw_completion(cli: Stage) -> None:
    cli("m.gguf", "Once upon", "-no-cnv")
    assert cli.request == "Once upon"
    cli("m.gguf", "Once upon", template=False)
    assert cli.request == "Once upon"
    result = cli("m.gguf", "Once upon", "-cnv", template=False)
    assert result.exit_code == 1
    assert "no chat template" in result.stderr
    assert cli("m.gguf", "hi", "-s", "be brief", template=False).exit_code == 1


# --- failures


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Model path does not exist: m.gguf"),
        ConfigError("unknown policy 'x': use lru"),
        LibraryError("llama_cpp is already loaded"),
    ],
)
def test_a_model_that_cannot_be_loaded(cli: Stage, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(**settings: Any) -> None:
        raise error

    monkeypatch.setattr(model, "create_llama", fail)
    result = cli("m.gguf", "hi")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"Error: {error}\n")
    verbose = cli("m.gguf", "hi", "-v")
    assert verbose.exit_code == 1
    assert "Traceback" in verbose.stderr


def test_a_prompt_that_does_not_fit(cli: Stage) -> None:
    result = cli("m.gguf", "hi", error=ContextFull("Requested tokens (9) exceed context window of 8"))
    assert (result.exit_code, result.stdout) == (1, "")
    told = "Error: Requested tokens (9) exceed context window of 8: give a larger context with -c"
    assert result.stderr.startswith(told)
    assert cli.made[0].closed


def test_ctrl_c_keeps_what_was_said(cli: Stage) -> None:
    before = signal.getsignal(signal.SIGINT)  # ignored, where a shell started the tests in the background
    result = cli("m.gguf", "hello", "--kvflash", "1024", on_token=interrupt_at(2))
    assert (result.exit_code, result.stdout) == (130, REPLY[:3] + "\n")
    assert "3 recalled, 83 copied to the host | read exactly | interrupted" in result.stderr
    assert "Traceback" not in result.stderr
    assert cli.made[0].closed
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_while_the_prompt_is_read(cli: Stage) -> None:
    result = cli("m.gguf", "hello", "--json", on_prompt=interrupt_at(1))
    document = json.loads(result.stdout)
    assert (result.exit_code, document["text"]) == (130, "")
    assert document["finish_reason"] == "interrupted"
    assert document["timings"]["prompt_evaluated"] == 2


def test_a_second_ctrl_c_ends_at_once(cli: Stage) -> None:
    result = cli("m.gguf", "hello", on_token=interrupt_at(2, 2))
    assert (result.exit_code, result.stdout) == (130, REPLY[:2])
    assert cli.made[0].closed


# --- the chat


def test_chat_remembers(cli: Stage, terminal: None) -> None:
    result = cli("m.gguf", "-s", "be brief", stdin="one\n\ntwo\n/exit\nnever\n", replies=["1", "2"])
    assert (result.exit_code, result.stdout) == (0, "1\n2\n")
    assert cli.request == [
        {"role": "system", "content": "be brief"},
        user("one"),
        assistant("1"),
        user("two"),
    ]


def test_a_piped_chat_ends_with_its_input(cli: Stage) -> None:
    result = cli("m.gguf", "-cnv", stdin="one\ntwo", replies=["1", "2"])
    assert (result.exit_code, result.stdout) == (0, "1\n2\n")
    assert ">" not in result.stderr


def test_a_prompt_begins_the_chat_if_asked(cli: Stage, terminal: None) -> None:
    assert cli("m.gguf", "one", "-cnv", stdin="two\n").exit_code == 0
    assert cli.request == [user("one"), assistant(), user("two")]
    cli("m.gguf", "one", stdin="two\n")
    assert cli.request == [user("one")]


def test_several_lines(cli: Stage) -> None:
    cli("m.gguf", "-cnv", stdin='"""one\n/two\nthree"""\n')
    assert cli.request == [user("one\n/two\nthree")]
    cli("m.gguf", "-cnv", stdin='"""\none\n"""\n')
    assert cli.request == [user("one")]


def test_clear_and_regen(cli: Stage) -> None:
    result = cli("m.gguf", "-cnv", "--seed", "5", stdin="/regen\none\n/regen\n", replies=["1", "2"])
    assert result.stdout == "1\n2\n"
    assert "no answer to regenerate" in result.stderr
    first, second = cli.made[-1].requests
    assert first[0] == second[0] == [user("one")]
    assert (first[1]["seed"], second[1]["seed"]) == (5, 6)
    cli("m.gguf", "-cnv", stdin="one\n/clear\ntwo\n")
    assert cli.request == [user("two")]


def test_read_puts_a_file_first(cli: Stage, tmp_path: Path) -> None:
    path = tmp_path / "a book.txt"
    path.write_text("chapter one\n")
    result = cli("m.gguf", "-cnv", stdin=f"/read '{path}'\nwho?\n/read nowhere\n/read\n")
    assert cli.request == [user("chapter one\n\nwho?")]
    assert "12 characters" in result.stderr
    assert "nowhere: No such file or directory. Check the name" in result.stderr
    assert "usage: /read FILE" in result.stderr


def test_stats_and_unknown_commands(cli: Stage) -> None:
    result = cli("m.gguf", "-cnv", "--kvflash", "1024", stdin="/stats\n/what\none\n/stats\n/help\n")
    assert result.stdout == REPLY + "\n"
    assert result.stderr.count("resident 16/84 chunks") == 3
    assert "/what is not a command" in result.stderr
    assert "/regen" in result.stderr


def test_a_failed_turn_is_taken_back(cli: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter([None, ContextFull("too long"), None])
    inner = FakeLlama._chunks

    def sometimes(self: FakeLlama, text: str, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.error = next(errors)
        return inner(self, text, settings)

    monkeypatch.setattr(FakeLlama, "_chunks", sometimes)
    result = cli("m.gguf", "-cnv", stdin="one\ntwo\nthree\n")
    assert result.exit_code == 0
    assert "Error: too long" in result.stderr
    assert cli.request == [user("one"), assistant(), user("three")]


def test_ctrl_c_in_a_chat_stops_the_answer_only(cli: Stage) -> None:
    result = cli("m.gguf", "-cnv", stdin="one\ntwo\n", on_token=interrupt_at(2))
    assert (result.exit_code, result.stdout) == (0, f"{REPLY[:3]}\n" * 2)
    assert cli.request == [user("one"), assistant(REPLY[:3]), user("two")]


def test_ctrl_c_before_the_answer_takes_the_message_back(cli: Stage) -> None:
    presses = iter([True])

    def once(done: int) -> None:
        if next(presses, False):
            signal.raise_signal(signal.SIGINT)

    result = cli("m.gguf", "-cnv", stdin="one\ntwo\n", on_prompt=once)
    assert "taken back" in result.stderr
    assert cli.request == [user("two")]


@pytest.mark.parametrize(("lines", "code"), [(["C", "C"], 130), (["C", "one", "C", "/exit"], 0)])
def test_ctrl_c_at_the_prompt(cli: Stage, monkeypatch: pytest.MonkeyPatch, lines: list[str], code: int) -> None:
    queue = iter(lines)

    def read(mark: str) -> str:
        line = next(queue)
        if line == "C":
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr(chat, "_read_line", read)
    result = cli("m.gguf", "-cnv")
    assert result.exit_code == code
    assert "Ctrl-C again" in result.stderr


def test_chat_needs_a_template_and_text_output(cli: Stage, terminal: None) -> None:
    assert cli("m.gguf", template=False).exit_code == 1
    assert cli("m.gguf", "--json").exit_code == 2
    assert cli("m.gguf", "-no-cnv").exit_code == 2


# --- help and version


def test_help(cli: Stage) -> None:
    group = cli("-h")
    assert group.exit_code == 0
    assert "doctor" in group.stdout
    verb = cli("run", "--help-all")
    for text in ("KVFlash:", "Sampling:", "--kvflash TOKENS|SIZE|auto|off", "-ngl, --n-gpu-layers"):
        assert text in verb.stdout
    assert cli().exit_code == 2


def test_version(cli: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    info = {"llama_cpp_commit": "0c1e57098bba", "ggml": "0.25.3", "backends": ["cpu", "cuda"]}
    monkeypatch.setattr("kvflash_ggml.cli.report.library.build_info", lambda: info)
    result = cli("--version")
    assert result.exit_code == 0
    assert result.stdout.endswith("(llama.cpp 0c1e57098bba, ggml 0.25.3, CUDA)\n")

    def unbuilt() -> None:
        raise LibraryError("not built")

    monkeypatch.setattr("kvflash_ggml.cli.report.library.build_info", unbuilt)
    assert "doctor" in cli("--version").stdout


def test_the_version_is_told_without_numpy() -> None:
    code = """
import sys
from kvflash_ggml.cli import main
main(["--version"], standalone_mode=False)
print("numpy" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("kvflash-run ")
    assert done.stdout.endswith("False\n")


SOUND = b"RIFF\0\0\0\0WAVE"


def test_images_and_sounds_come_before_the_prompt(cli: Stage, tmp_path: Path, terminal: None) -> None:
    one, other, sound = tmp_path / "a.png", tmp_path / "b.png", tmp_path / "c.wav"
    one.write_bytes(b"\1")
    other.write_bytes(b"\2")
    sound.write_bytes(SOUND)
    urls = ["data:image;base64,AQ==", "data:image;base64,Ag=="]
    asked = ["m.gguf", "--mmproj", one, "--audio", sound, "--image", one, "--image", other, "-p", "What?"]
    assert cli(*asked, "--kvflash", "1024").exit_code == 0
    assert cli.settings["mmproj"] == one
    (message,) = cli.request
    assert [part["image_url"]["url"] for part in message["content"][:2]] == urls
    assert message["content"][2] == {"type": "input_audio", "input_audio": {"data": "UklGRgAAAABXQVZF"}}
    assert message["content"][-1] == {"type": "text", "text": "What?"}
    for refused, why in (
        (["m.gguf", "--image", one, "-p", "What?"], "--image needs the model's projector"),
        (["m.gguf", "--audio", sound, "-p", "What?"], "--audio needs the model's projector"),
        ([*asked, "-no-cnv"], "leave out -no-cnv"),
    ):
        result = cli(*refused)
        assert result.exit_code == 2
        assert why in result.stderr


def test_a_chat_takes_an_image(cli: Stage, tmp_path: Path) -> None:
    image = tmp_path / "a.png"
    image.write_bytes(b"\1")
    result = cli("m.gguf", "-cnv", "--mmproj", image, stdin=f"/image '{image}'\nwho?\nand?\n/image nowhere\n/image\n")
    first, _answer, second = cli.made[-1].requests[-1][0]
    assert [part["type"] for part in first["content"]] == ["image_url", "text"]
    assert second["content"] == "and?"
    assert f"{image}: put before your next message" in result.stderr
    assert "nowhere is no file" in result.stderr
    assert "usage: /image FILE" in result.stderr
    image.write_bytes(SOUND)
    cli("m.gguf", "-cnv", "--mmproj", image, stdin=f"/audio '{image}'\nwho?\n")
    assert [part["type"] for part in cli.made[-1].requests[-1][0][0]["content"]] == ["input_audio", "text"]
    assert "--mmproj FILE" in cli("m.gguf", "-cnv", stdin=f"/image '{image}'\n").stderr


@pytest.mark.parametrize("verb", ["convert", "quantize"])
def test_a_verb_of_the_other_program(cli: Stage, verb: str) -> None:
    result = cli(verb, "x")
    assert (result.exit_code, "kvflash-convert" in result.output) == (2, True)
