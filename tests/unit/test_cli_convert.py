"""`kvflash-convert`: what is said, where, and with which exit code; llama.cpp's converter is a fake."""

from __future__ import annotations

import hashlib
import io
import json
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.checkpoints import config, rewritten, small_checkpoint, small_eagle3, small_target

from kvflash_ggml import pip_line
from kvflash_ggml.cli import convert as verbs
from kvflash_ggml.cli.child import Child
from kvflash_ggml.cli.convert import convert
from kvflash_ggml.convert import draft, upstream
from kvflash_ggml.errors import LibraryError
from kvflash_ggml.gguf import reader, types, verify
from kvflash_ggml.gguf.reader import Field


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(convert, [*map(str, arguments)], prog_name="kvflash-convert")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return small_target(tmp_path / "target.gguf", whole=True)


@pytest.fixture
def drafter(tmp_path: Path, target: Path) -> Path:
    out = tmp_path / "draft.gguf"
    assert cli("draft", small_checkpoint(tmp_path / "drafter"), "--target", target, "-o", out).exit_code == 0
    return out


# --- what is said


def test_a_file_has_a_name_of_its_own(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_checkpoint(tmp_path / "drafter")
    monkeypatch.chdir(tmp_path)
    result = cli("draft", "drafter", "--target", target)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.startswith("written to drafter-f16.gguf, ")
    assert (tmp_path / "drafter-f16.gguf").is_file()


@pytest.mark.parametrize(("sent", "before"), [("SIGTERM", "DFL"), ("SIGHUP", "DFL"), ("SIGHUP", "IGN")])
def test_a_signal_leaves_no_half_file(tmp_path: Path, drafter: Path, sent: str, before: str) -> None:
    """One that is ignored, as nohup does, changes nothing."""
    script = f"""
import signal, sys
from kvflash_ggml.cli.convert import convert
from kvflash_ggml.gguf import encoding

def stopped(*given, encode=encoding.encode):
    signal.raise_signal(signal.{sent})
    return encode(*given)

encoding.encode = stopped
signal.signal(signal.{sent}, signal.SIG_{before})
convert(sys.argv[1:])
"""
    there, out = {*tmp_path.iterdir()}, tmp_path / "small.gguf"
    done = subprocess.run([sys.executable, "-c", script, "quantize", "-q", drafter, out], check=False)
    code, made = (0, {out}) if before == "IGN" else (128 + signal.Signals[sent], set())
    assert (done.returncode, {*tmp_path.iterdir()} - there) == (code, made)


def test_a_refusal_says_what_was_found_and_wanted_and_helps(tmp_path: Path, target: Path) -> None:
    result = cli("draft", small_checkpoint(tmp_path / "drafter", rope_theta=1e7), "--target", target)
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: drafter: RoPE theta is 1e+07; wanted: 1e+06, the target's. ")
    assert line.endswith("add --rope-differs.")
    command = ("draft", tmp_path / "drafter", "--target", target, "--rope-differs", "-q", "-o", tmp_path / "a.gguf")
    assert cli(*command).stderr == ""


def test_verify_says_what_fits(drafter: Path, target: Path, tmp_path: Path) -> None:
    result = cli("verify", drafter, "--target", target)
    assert result.exit_code == 0
    assert result.stdout == (
        f"{drafter}: a DFlash drafter of 2 layers, blocks of 8, that reads the inputs of layers 1, 3; "
        "it fits target.gguf, the model that it was trained for, or a fine-tuned one of the same embedding\n"
    )
    broken = rewritten(drafter, tmp_path / "broken.gguf", lambda fields: fields.pop("dflash.target_layers"))
    result = cli("verify", broken)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "dflash.target_layers" in result.stderr


def test_inspect_for_people_and_programs(drafter: Path, target: Path, tmp_path: Path) -> None:
    result = cli("inspect", drafter, tmp_path / "none.gguf", target)
    assert result.exit_code == 1
    assert "none.gguf" in result.stderr
    for text in ("dflash, drafter", "target_layers [1, 3]", "trained for  4,096 tokens", "no chat template", "qwen3"):
        assert text in result.stdout
    result = cli("inspect", "--json", drafter, tmp_path / "none.gguf")
    found, missing = json.loads(result.stdout)
    assert (found["architecture"], found["drafter"]["block_size"]) == ("dflash", 8)
    assert "not there" in missing["error"]


@pytest.mark.parametrize(("terminal", "quiet"), [(True, False), (True, True), (False, False)])
def test_progress_is_for_a_terminal(
    terminal: bool, quiet: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verbs, "stderr_is_terminal", lambda: terminal)
    with verbs.working("writing a.gguf", quiet=quiet) as progress:
        progress(50 << 20, 100 << 20)
    shown = capsys.readouterr()
    assert ("writing a.gguf:  50% of 100 MiB" in shown.err) == (terminal and not quiet)
    assert shown.out == ""


def test_bytes_are_counted_to_the_last(tmp_path: Path, target: Path) -> None:
    seen: list[tuple[int, int]] = []
    out = tmp_path / "draft.gguf"
    draft.convert(small_checkpoint(tmp_path / "drafter"), out, model=target, progress=lambda *at: seen.append(at))
    written = sum(tensor.nbytes for tensor in reader.read(out).tensors.values())
    assert seen == sorted(seen)
    assert seen[-1] == (written, written)
    verify.verify(out, model=target, progress=lambda *at: seen.append(at))
    assert seen[-1] == (written, written)


def test_no_input_is_written_over(tmp_path: Path, drafter: Path, target: Path) -> None:
    before = target.read_bytes()
    result = cli("draft", tmp_path / "drafter", "--target", target, "-o", target)
    assert result.exit_code == 1
    assert "another file" in result.stderr
    assert target.read_bytes() == before


# --- quantize


def test_what_a_quantised_drafter_loses_is_printed(
    tmp_path: Path, drafter: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    before, after = {"accepted": 3.0, "steps": 10, "block": 7}, {"accepted": 2.0, "steps": 12, "block": 7}

    def child(request: str, **_: Any) -> Child:
        asked.append(json.loads(request))
        return Child(said={"drafts": [before, after]}, doing="start", failure="")

    monkeypatch.setattr(verbs, "run_child", child)
    monkeypatch.setattr(verbs.library, "library_folder", lambda: tmp_path)
    (tmp_path / "text.txt").write_text("once upon a time")
    out = tmp_path / "small.gguf"
    result = cli(
        "quantize", drafter, out, "--type", "f16", "--target", target, "--text", tmp_path / "text.txt", "-n", 9
    )
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "before   3.00 of 7 drafted tokens accepted, in 10 steps",
        "after    2.00 of 7 drafted tokens accepted, in 12 steps",
        "tokens a step: -25.0%",
    ]
    assert "more than 5% is lost" in result.stderr
    assert asked == [
        {"target": str(target), "drafts": [str(drafter), str(out)], "tokens": 9, "texts": ["once upon a time"]}
    ]


def test_a_measurement_that_fails_says_why(
    tmp_path: Path, drafter: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = Child(said={}, doing="start", failure="crashed with SIGSEGV", crashed=True)
    monkeypatch.setattr(verbs, "run_child", lambda *_, **__: failed)
    monkeypatch.setattr(verbs.library, "library_folder", lambda: tmp_path)
    result = cli("quantize", drafter, tmp_path / "small.gguf", "--type", "f16", "--target", target)
    assert result.exit_code == 1
    assert "crashed with SIGSEGV" in result.stderr
    assert (tmp_path / "small.gguf").is_file()


def test_measuring_without_the_library_is_refused_before(
    tmp_path: Path, drafter: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFLASH_LIB_PATH", str(tmp_path))
    for command in (("quantize", drafter, tmp_path / "small.gguf", "--type", "f16"), ("verify", drafter, "--measure")):
        result = cli(*command, "--target", target)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "library is missing" in result.stderr
    assert not (tmp_path / "small.gguf").exists()


def test_types_of_ggml_need_the_library(tmp_path: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise LibraryError("the library is missing.")

    monkeypatch.setattr("kvflash_ggml.native.library.load", missing)
    monkeypatch.setattr("kvflash_ggml.convert.quantize.chosen", lambda tensor, kind: types.BY_NAME["q4_k"])
    result = cli("quantize", drafter, tmp_path / "small.gguf", "--type", "q4_k_m")
    assert result.exit_code == 1
    assert "q4_k is made by ggml itself; without it there are bf16" in result.stderr
    assert result.stderr.endswith("q8_0. the library is missing.\n")
    assert not (tmp_path / "small.gguf").exists()


def test_one_file_is_measured_too(tmp_path: Path, drafter: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"drafts": [{"accepted": 0.5, "steps": 10, "block": 7}]}
    monkeypatch.setattr(verbs, "run_child", lambda *_, **__: Child(said=said, doing="start", failure=""))
    monkeypatch.setattr(verbs.library, "library_folder", lambda: tmp_path)
    result = cli("verify", drafter, "--target", target, "--measure", "-q")
    assert (result.exit_code, result.stdout) == (0, "draft    0.50 of 7 drafted tokens accepted, in 10 steps\n")
    assert "--target" in cli("verify", drafter, "--measure").stderr


@pytest.mark.parametrize(
    ("accepted", "steps", "why"),
    [
        (0.0, 256, "target.gguf accepts 0.00 drafted tokens a step, measured in 256 steps: draft.gguf was trained for"),
        (0.004, 256, "target.gguf accepts 0.00 drafted tokens"),
        (0.0, 0, "draft.gguf was not measured: every text ended within its first draft"),
    ],
)
@pytest.mark.parametrize("verb", [["verify", "--measure"], ["quantize", "small.gguf", "--type", "f16"]], ids=str)
def test_a_drafter_that_is_never_accepted_does_not_fit(
    tmp_path: Path,
    drafter: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: list[str],
    accepted: float,
    steps: int,
    why: str,
) -> None:
    it = {"accepted": accepted, "steps": steps, "block": 7}
    said = {"drafts": [it, it] if verb[0] == "quantize" else [it]}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verbs, "run_child", lambda *_, **__: Child(said=said, doing="start", failure=""))
    monkeypatch.setattr(verbs.library, "library_folder", lambda: tmp_path)
    result = cli(verb[0], drafter, *verb[1:], "--target", target)
    assert result.exit_code == 1
    assert f"Error: {why}" in result.stderr
    assert "it fits" not in result.stdout


def test_what_the_system_refuses_is_a_sentence(tmp_path: Path, drafter: Path) -> None:
    for arguments in ((tmp_path / ("a" * 300), tmp_path / "o.gguf"), (drafter, tmp_path / ("a" * 300))):
        result = cli("quantize", *arguments)
        assert (result.exit_code, "Errno" in result.stderr) == (1, False)
        assert "aaa: File name too long. Check the name, and who may use it." in result.stderr


# --- llama.cpp's converter

FAKE = """
import sys
from pathlib import Path
arguments = sys.argv[1:]
out = Path(arguments[arguments.index("--outfile") + 1])
source = Path(arguments[0]) / "ready.gguf"
print("converting", *arguments, file=sys.stderr)
if not source.exists():
    sys.exit("ValueError: no such model")
name = "mtp-" + out.name if "--mtp" in arguments else out.name
out.with_name(name).write_bytes(source.read_bytes())
"""


@pytest.fixture
def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree whose converter copies a file, and all packages."""
    tree = tmp_path / "llama.cpp"
    tree.mkdir()
    (tree / "convert_hf_to_gguf.py").write_text(FAKE)
    monkeypatch.setenv("KVFLASH_LLAMA_SOURCE", str(tree))
    monkeypatch.setattr(upstream, "NEEDED", ("json",))
    return tree


@pytest.fixture
def model(tmp_path: Path, target: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "ready.gguf").write_bytes(target.read_bytes())
    return folder


def test_a_model_is_converted_by_the_child(tmp_path: Path, converter: Path, model: Path, target: Path) -> None:
    out = tmp_path / "out.gguf"
    before = {path.name for path in tmp_path.iterdir()}
    for extra in ((), ("--", "--mtp")):
        result = cli("model", model, "-o", out, "-q", *extra)
        assert (result.exit_code, result.output) == (0, "")
        assert out.read_bytes() == target.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == before | {"out.gguf"}


def test_a_child_that_fails_is_quoted(tmp_path: Path, converter: Path, model: Path) -> None:
    (model / "ready.gguf").unlink()
    result = cli("model", model, "-o", tmp_path / "out.gguf", "-q")
    assert result.exit_code == 1
    assert "model: the exit code of llama.cpp's converter is 1" in result.stderr
    assert "ValueError: no such model" in result.stderr
    assert not (tmp_path / "out.gguf").exists()


def test_a_child_that_was_seen_is_not_quoted(tmp_path: Path, converter: Path, model: Path) -> None:
    (model / "ready.gguf").unlink()
    result = cli("model", model, "-o", tmp_path / "out.gguf")
    assert "It says why above." in result.stderr


def test_what_the_child_writes_must_be_a_gguf(tmp_path: Path, converter: Path, model: Path) -> None:
    (model / "ready.gguf").write_bytes(b"something else")
    result = cli("model", model, "-o", tmp_path / "out.gguf", "-q")
    assert result.exit_code == 1
    assert "out.gguf" in result.stderr
    assert not (tmp_path / "out.gguf").exists()


def test_packages_that_are_missing_are_named(
    tmp_path: Path, converter: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "NEEDED", ("json", "no_such_package", "no_such.module"))
    result = cli("model", model, "-o", tmp_path / "out.gguf")
    assert result.exit_code == 1
    assert "needs no_such_package, no_such.module" in result.stderr
    assert pip_line.install("convert") in result.stderr


def test_a_folder_without_a_configuration_is_no_model(tmp_path: Path, converter: Path) -> None:
    result = cli("model", tmp_path, "-o", tmp_path / "out.gguf")
    assert (result.exit_code, "config.json is not there" in result.stderr) == (1, True)


def test_other_drafters_are_checked_before_and_after(
    tmp_path: Path, converter: Path, drafter: Path, target: Path, model: Path
) -> None:
    folder, out = tmp_path / "drafter", tmp_path / "out.gguf"
    command = ("draft", folder, "--target", target, "--target-model-dir", model, "-o", out, "-q")
    (folder / "ready.gguf").write_bytes(drafter.read_bytes())
    assert cli(*command).exit_code == 0
    assert out.read_bytes() == drafter.read_bytes()
    rewritten(drafter, folder / "ready.gguf", lambda fields: fields.update({"x": Field.of("dflash.block_size", 1)}) or
              fields.pop("dflash.block_size"))  # fmt: skip
    result = cli(*command)
    assert result.exit_code == 1
    assert "out.gguf: block size is 1" in result.stderr
    assert out.read_bytes() == drafter.read_bytes()
    settings = json.loads((folder / "config.json").read_text())
    for block_size in (None, 8):
        settings["block_size"] = block_size
        (folder / "config.json").write_text(json.dumps(settings))
        assert ("block_size is not there" in cli(*command).stderr) == (block_size is None)
    (folder / "model.safetensors").write_bytes(b"nothing")
    assert "the length of the header" in cli(*command).stderr


def test_what_the_child_would_guess_is_refused_or_said(
    tmp_path: Path, converter: Path, drafter: Path, target: Path, model: Path
) -> None:
    folder, out = tmp_path / "drafter", tmp_path / "out.gguf"
    command = ("draft", folder, "--target", target, "--target-model-dir", model, "-o", out, "--rope-differs")
    (folder / "ready.gguf").write_bytes(drafter.read_bytes())
    for changes, missing in (
        ({"rope_theta": None}, True),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 1e4}}, False),
        ({"rope_theta": None, "transformer_layer_config": {"rope_theta": 1e4}}, False),
    ):
        (folder / "config.json").write_text(json.dumps(config(**changes)))
        assert ("rope_theta is not there" in cli(*command).stderr) == missing
    small_eagle3(folder / "ready.gguf", layers=[1, 2, 3])
    name = "eagle_aux_hidden_state_layer_ids"
    for settings, said in (
        ({name: [1, 2, 3]}, "layers 1, 2, 3; it"),
        ({}, "; config.json names no target layers: these are EAGLE3's usual ones\n"),
        ({"eagle_config": {name: [1, 2, 4]}}, "target layers is [1, 2, 3]; wanted: [1, 2, 4], which config.json names"),
    ):
        (folder / "config.json").write_text(json.dumps(settings))
        assert said in cli(*command).stderr


def test_tensors_that_torch_has_pickled_are_left_to_the_child(
    tmp_path: Path, converter: Path, drafter: Path, target: Path, model: Path
) -> None:
    folder = tmp_path / "drafter"
    command = ("draft", folder, "--target", target, "-o", tmp_path / "out.gguf")
    (folder / "ready.gguf").write_bytes(drafter.read_bytes())
    (folder / "model.safetensors").unlink()
    assert "the .safetensors files" in cli(*command, "--target-model-dir", model).stderr
    (folder / "pytorch_model.bin").touch()
    assert cli(*command, "--target-model-dir", model).exit_code == 0
    assert cli(*command).stderr.endswith("With --target-model-dir llama.cpp's own converter reads torch's files.\n")


@pytest.fixture
def cache(tmp_path: Path, converter: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no source tree of one's own."""
    monkeypatch.delenv("KVFLASH_LLAMA_SOURCE")
    monkeypatch.delenv("KVFLASH_SDIST", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "cache/kvflash_ggml"
    folder.mkdir(parents=True)
    return folder


def sdist(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    root = "llama_cpp_python-0.0.1/vendor/llama.cpp"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in (("convert_hf_to_gguf.py", FAKE), ("conversion/__init__.py", ""), ("src/a.cpp", "")):
            entry = tarfile.TarInfo(f"{root}/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(upstream.library, "build_info", lambda: {"sdist_sha256": digest, "llama_cpp_python": "0.0.1"})
    return path


def test_the_source_of_a_build_is_used(
    tmp_path: Path, cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        upstream.library, "build_info", lambda: {"sdist_sha256": "ab" * 32, "llama_cpp_python": "0.0.1"}
    )
    tree = cache / "src" / ("ab" * 6)
    (tree / "llama.cpp").mkdir(parents=True)
    (tree / "llama.cpp/convert_hf_to_gguf.py").write_text(FAKE)
    assert cli("model", model, "-o", tmp_path / "out.gguf", "-q").exit_code == 1
    (tree / ".complete").touch()
    assert cli("model", model, "-o", tmp_path / "out.gguf", "-q").exit_code == 0
    assert list(tree.rglob("*.pyc")) == []


@pytest.mark.parametrize("given", [True, False])
def test_the_pinned_sdist_is_unpacked_for_a_while(
    tmp_path: Path, cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    archive = sdist((tmp_path if given else cache / "sdist") / "llama_cpp_python-0.0.1.tar.gz", monkeypatch)
    if given:
        monkeypatch.setenv("KVFLASH_SDIST", str(archive))
    assert cli("model", model, "-o", tmp_path / "out.gguf", "-q").exit_code == 0
    with archive.open("ab") as file:
        file.write(b"changed")
    result = cli("model", model, "-o", tmp_path / "out.gguf", "-q")
    assert result.exit_code == 1
    assert "KVFLASH_SDIST" in result.stderr


def test_the_pin_of_a_checkout_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def unbuilt() -> dict[str, Any]:
        raise LibraryError("not built")

    monkeypatch.setattr(upstream.library, "build_info", unbuilt)
    version, sha256 = upstream.pinned()
    assert (version[0], len(sha256)) == ("0", 64)


def test_what_the_extra_names_is_what_is_asked_for() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("convert = "))
    names = {name.split(".")[-1] for name in upstream.NEEDED}
    assert all(name in line for name in names), line


def test_nothing_is_left_of_a_file_that_was_given_a_prefix(tmp_path: Path, converter: Path, model: Path) -> None:
    cli("model", model, "-o", tmp_path / "out.gguf", "-q", "--", "--mtp")
    assert reader.read(tmp_path / "out.gguf").architecture == "qwen3"
    assert [path.name for path in tmp_path.iterdir() if "mtp" in path.name] == []
