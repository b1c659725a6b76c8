"""`kvflash-run serve` up to the start of the server, and the options that llama-server and llama-cli have."""

from __future__ import annotations

import importlib.metadata
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import options_table
import pytest
from click.testing import Result
from support.fake_llama import Stage, staged

from kvflash_ggml import notation
from kvflash_ggml.batching.messages import Sampling
from kvflash_ggml.cli import model, report
from kvflash_ggml.cli.llama_flags import ANSWERED, SWITCHED, TAKEN
from kvflash_ggml.cli.run import run
from kvflash_ggml.cli.serve import serve as serving
from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.errors import ConfigError, HostMemoryError, UnsupportedModelError
from kvflash_ggml.server import run as run_of
from kvflash_ggml.server.settings import ServerSettings
from kvflash_router import router

VERBS = {"run": run, "serve": serving}


def answers(verb: str) -> list[str]:
    """The options that it answers: those that it has not itself."""
    own = {name for param in VERBS[verb].params if not getattr(param, "hidden", False) for name in param.opts}
    return [name for names in ANSWERED for name in names if name not in own]


@dataclass
class Serving:
    """The command line, and the settings of the servers that it has started."""

    cli: Stage
    started: list[ServerSettings] = field(default_factory=list)

    def __call__(self, *arguments: object) -> Result:
        return self.cli("serve", *arguments)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    yield from staged(monkeypatch)


@pytest.fixture
def serve(cli: Stage, monkeypatch: pytest.MonkeyPatch) -> Serving:
    serving = Serving(cli)

    def started(
        llm: Any, settings: ServerSettings, _sock: object, *, found: Callable[[int], None], **_more: Any
    ) -> None:
        serving.started.append(settings)
        found(2)

    monkeypatch.setattr(run_of, "start", started)
    monkeypatch.setattr(run_of, "listen", lambda _settings: nullcontext())
    return serving


def test_a_model_is_all_that_is_needed(serve: Serving) -> None:
    result = serve("folder/m.gguf")
    assert result.exit_code == 0, result.output
    assert serve.cli.settings["kvflash"] == KVFlashConfig(pool="auto", parallel="auto")
    assert serve.started[0].default_tokens == -1
    assert (serve.started[0].alias, serve.started[0].aliases) == ("m", ())
    assert serve("m.gguf", "-a", "one, two", "-n", "512", "-np", "1").exit_code == 0
    assert (serve.started[1].alias, serve.started[1].aliases) == ("one", ("two",))
    assert serve.started[1].default_tokens == 512
    assert serve.cli.settings["kvflash"].parallel == 1
    assert serve.started[0].sampling == Sampling()
    refused = serve("m.gguf", "--kvflash", "off")
    assert (refused.exit_code, "--kvflash auto" in refused.stderr) == (2, True)


def test_the_model_as_llama_server_takes_it(serve: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve("-m", "m.gguf").exit_code == 0
    assert serve.cli.settings["model_path"] == "m.gguf"
    assert "given twice" in serve("-m", "m.gguf", "n.gguf").stderr
    assert "which model?" in serve().stderr
    monkeypatch.setenv("KVFLASH_MODEL", "env.gguf")
    assert serve().exit_code == 0
    assert serve.cli.settings["model_path"] == "env.gguf"
    assert serve("n.gguf").exit_code == 0
    assert serve.cli.settings["model_path"] == "n.gguf"


def test_a_folder_of_models(serve: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[Path, ServerSettings, float | None]] = []
    monkeypatch.setattr(
        router, "serve", lambda folder, settings, *_, idle_s, **__: served.append((folder, settings, idle_s))
    )
    assert "has no model" in serve("--models-dir", tmp_path).stderr
    (tmp_path / "a.gguf").touch()
    monkeypatch.setenv("KVFLASH_MODEL", "env.gguf")
    result = serve("--models-dir", tmp_path, "--port", "81", "--idle", "-1")
    assert result.exit_code == 0, result.output
    assert "--session-dir DIR keeps them" in result.stderr
    assert serve("--models", tmp_path, "--session-dir", tmp_path / "s").stderr == ""
    assert [(folder, idle_s) for folder, _, idle_s in served] == [(tmp_path, None), (tmp_path, 300)]
    assert served[0][1].port == 81
    assert not serve.started, "this process loads none"
    for more in ("m.gguf", "-m m.gguf", "-hf o/r", "--alias name"):
        refused = serve("--models-dir", tmp_path, *more.split())
        assert (refused.exit_code, f"leave out {more}" in refused.stderr) == (2, True), refused.stderr
    assert serve("--models-dir", tmp_path / "nowhere").exit_code == 2
    refused = serve("--models-dir", tmp_path, "--mmproj", tmp_path / "a.gguf")
    assert (refused.exit_code, "beside its model, as mmproj-MODEL.gguf" in refused.stderr) == (2, True)


@pytest.mark.parametrize(("option", "folder"), [("--models-dir {}", "router"), ("m.gguf --store {}", "fleet")])
def test_what_is_a_distribution_of_its_own_says_so(
    option: str, folder: str, serve: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    result = serve(*option.format(tmp_path).split())
    said = f"needs kvflash-{folder}, which is not installed: pip install ./{folder} in the checkout"
    assert (result.exit_code, said in " ".join(result.stderr.split())) == (1, True), result.stderr
    assert not serve.started


@pytest.mark.parametrize(
    ("options", "one", "count", "shared"),
    [
        ((), (8192, 8192), 4, (16384, 4096)),
        (("-np", "2"), (8192, 8192), 2, (16384, 8192)),
        (("-np", "3"), (1024, 8192), 3, (1536, 512)),
        (("--kvflash", "12K"), (8192, 8192), 4, (12288, 3072)),
        (("--kvflash", "1K"), (1024, 8192), 2, (1024, 512)),
        (("--kvflash", "30M"), (8192, 8192), 4, (10240, 2560)),
        (("--kvflash-deterministic",), (8192, 8192), 1, (0, 0)),
        (("-np", "1"), (8192, 8192), 1, (0, 0)),
    ],
)
def test_a_dry_run_loads_nothing_and_takes_no_port(
    options: tuple[str, ...],
    one: tuple[int, int],
    count: int,
    shared: tuple[int, int],
    serve: Serving,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It tells the pool of one answer, which is placed, and that of several. one: slots, and the context."""
    asked: list[tuple[str, KVFlashConfig]] = []
    pool, n_ctx = one
    found: dict[str, Any] = {
        "fits": True, "table": "device  free", "options": ["-ngl", "0"], "pool": pool, "n_ctx": n_ctx, "n_ubatch": 512,
        "devices": [{"needs": {"KV": pool * 2048}}, {"needs": {"KV": pool * 1024}}],
    }  # fmt: skip

    def predicted(path: str, settings: dict[str, Any]) -> dict[str, Any]:
        asked.append((path, settings["kvflash"]))
        return found

    monkeypatch.setattr(report, "predicted", predicted)
    monkeypatch.setattr(run_of, "listen", lambda _settings: pytest.fail("no port"))
    result = serve("m.gguf", "--dry-run", "--embeddings", "--port", "81", "-a", "one,two", *options)
    assert result.exit_code == 0, result.output
    table = "device  free\nllama.cpp, with a full cache: llama-cli -m m.gguf -ngl 0\n"
    if count > 1:
        table += f"pool of {count} answers at once: {shared[0]:,} tokens, at least {shared[1]:,} for each; "
        table += f"the table is of one answer, with {pool:,}\n"
    assert result.stdout == f"{table}served: one at 127.0.0.1, port 81\n"
    given: dict[str, Any] = {"parallel": "auto", "deterministic": "--kvflash-deterministic" in options}
    given |= {"parallel": int(options[1])} if "-np" in options else {}
    given |= notation.pool(options[1]) or {} if "--kvflash" in options else {"pool": "auto"}
    assert asked == [("m.gguf", KVFlashConfig(**given, embedding=2048))]
    found = {"fits": False, "device": "CPU", "why": "CPU has 1 MiB free"}
    result = serve("m.gguf", "--dry-run")
    assert (result.exit_code, result.stdout) == (3, "does not fit: CPU has 1 MiB free\n")
    assert not serve.started
    assert not serve.cli.made
    refused = serve("--models-dir", Path(), "--dry-run")
    assert (refused.exit_code, "give the model's file" in refused.stderr) == (2, True)


def test_a_model_that_decodes_one_text_is_served_alone(serve: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what --parallel would have made possible, and no error about that."""

    def create(**settings: Any) -> Any:
        if settings["kvflash"].parallel > 1:
            raise UnsupportedModelError("n-gram inputs are of one sequence")
        return serve.cli.create(**settings)

    monkeypatch.setattr(model, "create_llama", create)
    result = serve("m.gguf", "-np", "4", "--deterministic-batch", "--kvflash-tau", "8")
    assert result.exit_code == 0, result.output
    assert "--parallel 4 has no effect, answers take turns: n-gram inputs" in result.stderr
    assert not serve.cli.settings["kvflash"].deterministic_batch
    alone = serve("m.gguf", "-np", "1", "--deterministic-batch", "--kvflash-tau", "8")
    assert alone.exit_code != 0
    assert "parallel is 1: leave it out, or give parallel" in alone.stderr


def test_what_serves_one_needs_no_number_of_answers(serve: Serving) -> None:
    """The default means one then; a number of them is refused by name."""
    for line in (["--kvflash-answer", "lossless"], ["--kvflash-policy", "drafter"], ["--kvflash-deterministic"]):
        assert serve("m.gguf", *line).exit_code == 0
        assert serve.cli.settings["kvflash"].parallel == "auto"
    refused = serve("m.gguf", "--kvflash-answer", "lossless", "-np", "2")
    assert "serves one sequence, and parallel is 2" in refused.stderr


def test_a_model_that_cannot_be_opened_is_not_opened_again(serve: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def create(**settings: Any) -> Any:
        opened.append(settings["kvflash"].parallel)
        raise UnsupportedModelError("it has an encoder")

    monkeypatch.setattr(model, "create_llama", create)
    assert "it has an encoder" in serve("m.gguf").stderr
    assert opened == ["auto"]


def test_a_port_in_use_is_named_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as err:
            run_of.listen(ServerSettings(alias="a", port=port))
    assert str(err.value) == (
        f"cannot listen at 127.0.0.1, port {port}: Address already in use: give another --port or --host"
    )
    with pytest.raises(ConfigError, match=r"cannot listen at no\.invalid, port 0: .*[nN]ame"):
        run_of.listen(ServerSettings(alias="a", host="no.invalid", port=0))


def test_the_target_for_streams_is_in_milliseconds(serve: Serving) -> None:
    assert serve("m.gguf", "--itl-target", "40").exit_code == 0
    assert serve.started[0].itl_target_ms == 40
    assert serve("m.gguf", "--itl-target", "0").exit_code == 2


def test_as_many_answers_together_as_there_is_room_for(serve: Serving) -> None:
    assert serve("m.gguf", "-np", "auto").exit_code == 0
    assert serve.cli.settings["kvflash"].parallel == "auto"
    for wrong in ("0", "257", "many"):
        refused = serve("m.gguf", "-np", wrong)
        assert (refused.exit_code, "from 1 to 256, or 'auto'" in refused.stderr) == (2, True)


def test_a_command_line_of_llama_server(serve: Serving, tmp_path: Path) -> None:
    line = f"""-m m.gguf -a name -c 8192 -b 256 -ub 128 --gpu-layers 9 -t 3 -tb 2 -fa on -ctk q8_0 -ctv q8_0 --jinja
        --metrics --slots -cb -np 4 --no-webui --no-mmap --mlock --host 127.0.0.1 --port 81 --api-key k --temp 0.2
        --top-k 7 --top-p 0.5 --min-p 0.1 --repeat-penalty 1.1 -n 99 --slot-save-path {tmp_path}
        --deterministic-batch --kvflash-tau 8 --pool-share strict"""
    result = serve(*line.split())
    assert result.exit_code == 0, result.output
    assert serve.cli.settings["kvflash"].parallel == 4
    assert serve.cli.settings["kvflash"].deterministic_batch
    assert serve.cli.settings["kvflash"].pool_share == "strict"
    expected = {
        "n_ctx": 8192, "n_batch": 256, "n_ubatch": 128, "n_gpu_layers": 9, "n_threads": 3, "n_threads_batch": 2,
        "flash_attn": True, "type_k": 8, "type_v": 8, "use_mmap": False, "use_mlock": True,
    }  # fmt: skip
    assert {name: serve.cli.settings.get(name) for name in expected} == expected
    (settings,) = serve.started
    assert settings.sampling == Sampling(temperature=0.2, top_k=7, top_p=0.5, min_p=0.1, repeat_penalty=1.1)
    assert (settings.alias, settings.port, settings.keys, settings.page) == ("name", 81, ("k",), False)
    assert (settings.default_tokens, settings.session_dir) == (99, tmp_path)
    assert "-np" not in serve("m.gguf", "-np", "4", "-q").stderr
    assert "-np" not in serve("m.gguf", "-np", "1").stderr


def test_a_template_is_given_as_text(serve: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str | None] = []
    monkeypatch.setattr(run_of, "start", lambda *_, template, **__: given.append(template))
    assert serve("m.gguf", "--chat-template", "{{ messages[0].content }}").exit_code == 0
    assert serve("m.gguf", "--chat-template", "chatml").exit_code == 0
    assert given == ["{{ messages[0].content }}", "chatml"]


@pytest.mark.parametrize("verb", ["serve", "run"])
def test_what_is_so_anyway_is_taken(verb: str, serve: Serving) -> None:
    assert serve.cli(verb, "m.gguf", *TAKEN, *SWITCHED, *(["-p", "hi"] if verb == "run" else [])).exit_code == 0


@pytest.mark.parametrize("verb", VERBS)
def test_other_options_of_llama_cpp_are_answered(verb: str, serve: Serving) -> None:
    for name in answers(verb):
        result = serve.cli(verb, "m.gguf", name)
        assert (result.exit_code, f"{name} is llama.cpp's: " in result.stderr.replace("\n", " ")) == (2, True), name
    for line in (["--cache-reuse", "4", "-q"], ["-q", "--cache-reuse", "a b"], ["--cache-reuse=4"]):
        assert "--cache-reuse is llama.cpp's: " in serve.cli(verb, "m.gguf", *line).stderr.replace("\n", " ")
    assert not serve.cli.made


def test_the_documents_have_all_of_them() -> None:
    page = options_table.PAGE.read_text(encoding="utf-8")
    assert page == options_table.render(page), "run python scripts/options_table.py"


def test_no_option_is_there_twice_and_no_answer_is_empty() -> None:
    names = [*TAKEN, *SWITCHED, *(name for names in ANSWERED for name in names)]
    assert len(names) == len({*names})
    assert all(ANSWERED.values())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--rope-scaling linear --rope-scale 4", {"rope_scaling_type": 1, "rope_freq_scale": 0.25}),
        ("--rope-freq-base 1e6 --yarn-ext-factor 0", {"rope_freq_base": 1e6, "yarn_ext_factor": 0.0}),
        ("--lora a.gguf", {"lora_path": "a.gguf"}),
        ("--lora-scaled C:/a.gguf:0.5", {"lora_path": "C:/a.gguf", "lora_scale": 0.5}),
        (
            "--override-kv a.b=int:4 --override-kv c=bool:true --override-kv d=str:x:y",
            {"kv_overrides": {"a.b": 4, "c": True, "d": "x:y"}},
        ),
    ],
)
def test_what_llama_takes_as_keywords(words: str, expected: dict[str, Any], serve: Serving) -> None:
    result = serve("m.gguf", *words.split())
    assert result.exit_code == 0, result.output
    assert {name: serve.cli.settings.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--rope-scale 2 --rope-freq-scale 0.5", "give one of them"),
        ("--lora a --lora-scaled b:1", "leave one out"),
        ("--lora-scaled a.gguf", "as adapter.gguf:0.5"),
        ("--lora-scaled a.gguf:nan", "as adapter.gguf:0.5"),
        ("--override-kv a=4", "as qwen3.context_length=int:65536"),
        ("--override-kv a=int:four", "'four' is no value of the type int"),
        ("--yarn -c 8192", "the file says no length"),
        ("--api-prefix llm", "as /llm"),
        ("--chat-template llama3", "chatml is the only name"),
        ("--log-file /nowhere/at/all", "No such file"),
    ],
)
def test_what_llama_could_not_take(words: str, told: str, serve: Serving) -> None:
    result = serve("m.gguf", *words.split())
    assert result.exit_code == 2
    assert told in result.stderr.replace("\n", " ")


@pytest.mark.parametrize("verb", ["serve", "run"])
def test_a_mistyped_option_brings_the_near_one(verb: str, serve: Serving) -> None:
    result = serve.cli(verb, "m.gguf", "--kvflsh", "4096")
    assert result.exit_code == 2
    assert "(Did you mean" in result.stderr.replace("\n", " ")


@pytest.mark.parametrize("verb", ["serve", "run"])
def test_help_has_the_common_options_and_help_all_has_the_others(verb: str, cli: Stage) -> None:
    common, everything = cli(verb, "--help").stdout, cli(verb, "--help-all").stdout
    assert len(common.splitlines()) < 90
    assert len(re.findall(r"^  -", common, re.MULTILINE)) in range(20, 27)
    for name in ("-c, --ctx-size", "--kvflash TOKENS|SIZE|auto|off", "--help-all", "-q, --quiet", "--temp"):
        assert name in common
    for name in ("--kvflash-reading", "--override-tensor", "--help", "--spec-tree"):
        assert name in everything
    assert "--kvflash-reading" not in common
    assert "--jinja" not in everything
    assert everything.startswith(common.partition("\n")[0])


def test_the_pool_s_default_is_shown(cli: Stage) -> None:
    assert "[default: auto]" in " ".join(cli("serve", "--help").stdout.partition("--kvflash TOKENS")[2][:400].split())


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            HostMemoryError("more than host_limit = 5 bytes: raise host_limit, give a spill folder, or a larger pool"),
            "more than --kvflash-host-limit 5 bytes: raise --kvflash-host-limit, give a folder with --kvflash-spill, "
            "or a larger pool",
        ),
        (ConfigError("spill = x is no folder"), "--kvflash-spill x is no folder"),
    ],
)
def test_errors_name_flags(cli: Stage, error: Exception, told: str) -> None:
    result = cli("m.gguf", "hi", error=error)
    assert (result.exit_code, result.stderr) == (1, f"Error: {told}\n")


def test_calibrate_has_no_options_of_answers(cli: Stage) -> None:
    text = cli("calibrate", "--help").stdout
    for name in ("--stream", "--ctx-size", "--batch-size", "--cache-type-k", "--flash-attn", "timings"):
        assert name not in text
    for name in ("--save", "--json", "--n-gpu-layers", "--threads", "--rpc", "--quiet"):
        assert name in text


def test_keys_are_isolated_where_there_are_keys(serve: Serving) -> None:
    result = serve("m.gguf", "--isolate-keys")
    assert result.exit_code == 2
    assert "--isolate-keys without keys keeps nobody apart: give an --api-key" in result.output
    assert serve("m.gguf", "--isolate-keys", "--api-key", "one").exit_code == 0
    assert [settings.isolate_keys for settings in serve.started] == [True]


def test_a_prefix_cache_that_isolation_does_not_use_is_told(serve: Serving, tmp_path: Path) -> None:
    cache = ("--kvflash-cache", str(tmp_path))
    assert "--kvflash-cache does nothing" not in serve("m.gguf", "--api-key", "one", *cache).output
    assert "--kvflash-cache does nothing" in serve("m.gguf", "--isolate-keys", "--api-key", "one", *cache).output


def test_an_address_that_is_taken_is_found_before_the_model_is_loaded(cli: Stage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = cli("serve", "m.gguf", "--port", port)
    assert result.exit_code == 1
    assert f"port {port}" in result.stderr
    assert "give another --port or --host" in result.stderr
    assert cli.made == [], "no model is loaded"


def test_the_start_says_what_the_session_folder_has(serve: Serving, tmp_path: Path) -> None:
    assert f"2 conversations found in {tmp_path}" in serve("m.gguf", "--session-dir", tmp_path).stderr
    assert "found" not in serve("m.gguf", "--session-dir", tmp_path, "-q").stderr
    assert "found" not in serve("m.gguf").stderr


# --- values that cannot be meant


@pytest.mark.parametrize(
    ("option", "value", "limit"),
    [
        ("--api-key", "", "visible ASCII"),
        ("--cors-origins", "https://a.example/", "no slash at the end"),
        ("--alias", "", "names nothing"),
        ("--rpc", "", "names nothing"),
        ("--device", "", "names nothing"),
        ("--session-dir", "", "an empty text is no path"),
        ("--kvflash-cache", "", "an empty text is no path"),
        ("--kvflash-spill", "", "an empty text is no path"),
        ("--repeat-penalty", "0", "0<x<=10"),
        ("--threads", "513", "1<=x<=512"),
        ("--threads-batch", "99999999999", "1<=x<=512"),
        ("--batch-size", "99999999999", "1<=x<=2147483392"),
        ("--ubatch-size", "99999999999", "1<=x<=2147483392"),
        ("--top-k", "99999999999", "-1<=x<=1048576"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_before_loading(
    option: str, value: str, limit: str, serve: Serving
) -> None:
    result = serve("m.gguf", option, value)
    assert result.exit_code == 2
    told = " ".join(result.stderr.split())
    assert option in told
    assert limit in told
    assert not serve.cli.made


@pytest.mark.parametrize("verb", ["serve", "run"])
def test_a_value_that_a_later_one_replaces_brings_a_warning(verb: str, serve: Serving) -> None:
    line = ["m.gguf", "--kvflash", "1024", *(["-p", "hi"] if verb == "run" else [])]
    assert "warning" not in serve.cli(verb, *line, "-c", "4096", "--no-mmap", "--no-mmap", "-v", "-v").stderr
    result = serve.cli(verb, *line, "-c", "4096", "--ctx-size", "8192")
    assert result.exit_code == 0
    assert "warning: -c or --ctx-size is given 2 times, and only the last one counts" in result.stderr
    assert serve.cli.settings["n_ctx"] == 8192


def test_a_key_in_a_file_that_no_header_can_carry_is_refused(serve: Serving, tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("alice-1\n\n# of bob\nbob-1\n", encoding="utf-8")
    result = serve("m.gguf", "--api-key-file", file)
    assert (result.exit_code, "line 3 of" in " ".join(result.stderr.split())) == (2, True)
    assert "of bob" not in result.stderr


@pytest.mark.parametrize("option", ["--api-key-file", "--chat-template-file"])
def test_a_file_that_is_no_text_is_refused(option: str, serve: Serving, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(b"{%\xff%}")
    result = serve("m.gguf", option, file)
    assert (result.exit_code, "is not UTF-8 text (byte 2)" in " ".join(result.stderr.split())) == (2, True)


def test_a_wrong_value_of_a_variable_names_the_variable(serve: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLASH_PORT", "soon")
    told = " ".join(serve("m.gguf").stderr.split())
    assert "Invalid value for '--port' (from KVFLASH_PORT): 'soon'" in told
    assert "KVFLASH_PORT" not in serve("m.gguf", "--port", "now").stderr


def test_embeddings_leave_memory(serve: Serving) -> None:
    for line, words in (
        (["--embeddings", "--reranking"], "need different models"),
        (["--pooling", "mean"], "add --embeddings"),
        (["--embeddings", "--pooling", "rank"], "'rank' is not one of"),
        (["--embeddings", "--embedding-tokens", "8"], "64"),
    ):
        result = serve("m.gguf", *line)
        assert (result.exit_code, words in result.stderr) == (2, True), result.stderr
    serve("m.gguf", "--embeddings", "--embedding-tokens", "512")
    assert serve.cli.settings["kvflash"] == KVFlashConfig(pool="auto", embedding=512, parallel="auto")
