"""`-hf`, `pull`, `list` and `rm` on a hub of a few lines."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from support.fake_hub import COMMIT, Hub, serving
from support.fake_llama import REPLY, Stage, staged

from kvflash_ggml.cli import hub as models
from kvflash_ggml.cli.hub import HubModel, hub_model
from kvflash_ggml.errors import HubError
from kvflash_ggml.server import run

REPO = Hub.repo
SMALL = b"GGUF" + bytes(4000)
LARGE = b"GGUF" + bytes(range(256)) * 40
FILES = {
    "README.md": b"# A model",
    "model-Q2_K.gguf": SMALL,
    "model-Q4_K_M.gguf": LARGE,
    "model-Q8_0-00001-of-00002.gguf": LARGE + b"1",
    "model-Q8_0-00002-of-00002.gguf": LARGE + b"2",
    "mmproj-model-f16.gguf": SMALL + b"p",
    "mtp-model-Q8_0.gguf": SMALL + b"d",
    "imatrix.gguf": SMALL + b"i",
}


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    yield from staged(monkeypatch)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The hub's cache folder."""
    for name in ("HF_TOKEN", "HF_HOME", "HUGGINGFACE_HUB_CACHE", "KVFLASH_MODEL", "KVFLASH_HF_REPO"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[Hub]:
    library = pytest.importorskip("huggingface_hub", reason="needs the extra hub")
    with serving(Hub(files=dict(FILES))) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub
        if close := getattr(library, "close_session", None):
            close()


def snapshot(cache: Path) -> Path:
    return cache / "models--owner--model-GGUF" / "snapshots" / COMMIT


# --- names


@pytest.mark.parametrize(
    "text", ["model", "a/b/c", "../b", "a/..", "a--b/c", "a/b:", "a/b:../x", "", "a/b:Q4 K", "é/b"]
)
def test_other_texts_are_no_name(text: str) -> None:
    with pytest.raises(ValueError, match="write OWNER/REPO"):
        hub_model(text)


@pytest.mark.parametrize(
    ("which", "names", "files"),
    [
        ("", FILES, ["model-Q4_K_M.gguf"]),
        ("q2_k", FILES, ["model-Q2_K.gguf"]),
        ("Q8_0", FILES, ["model-Q8_0-00001-of-00002.gguf", "model-Q8_0-00002-of-00002.gguf"]),
        ("", ["a-Q2_K.gguf", "a-Q8_0.gguf"], ["a-Q8_0.gguf"]),
        ("", ["mmproj-a.gguf", "a-Q5_K.gguf", "a-Q6_K.gguf"], ["a-Q5_K.gguf"]),
        ("Q4_K_M", ["a-IQ4_K_M.gguf", "b/Q4_K_M/a.gguf"], ["b/Q4_K_M/a.gguf"]),
        ("mmproj-model-f16.gguf", FILES, ["mmproj-model-f16.gguf"]),
    ],
)
def test_a_name_chooses_files(which: str, names: Any, files: list[str]) -> None:
    assert HubModel(REPO, which).files(list(names)) == files


@pytest.mark.parametrize(
    ("which", "names", "why"),
    [
        ("Q5_K", FILES, r"Q5_K is not there; the repository has Q2_K, Q4_K_M, Q8_0: name one, as \S+:Q2_K"),
        ("", ["a.safetensors"], "has no .gguf file"),
        ("", ["a-00001-of-00003.gguf", "a-00003-of-00003.gguf"], "part 2 of 3 of a-00001-of-00003.gguf is missing"),
        ("", ["../../a-Q4_K_M.gguf"], "leads out of the repository"),
        ("", ["/etc/a.gguf"], "leads out of the repository"),
        ("", ["a\\..\\b.gguf"], "leads out of the repository"),
        ("", ["a\x1b[2J.gguf"], r"'a\\x1b\[2J.gguf'"),
    ],
)
def test_a_name_without_files(which: str, names: Any, why: str) -> None:
    with pytest.raises(HubError, match=why):
        HubModel(REPO, which).files(list(names))


# --- downloads


def test_pull_fetches_the_usual_file_once(cli: Stage, hub: Hub, cache: Path) -> None:
    result = cli("pull", REPO)
    assert (result.exit_code, result.stdout) == (0, f"{snapshot(cache)}/model-Q4_K_M.gguf\n"), result.output
    path = Path(result.stdout.strip())
    assert path.read_bytes() == LARGE
    assert path.resolve() == cache / "models--owner--model-GGUF" / "blobs" / hashlib.sha256(LARGE).hexdigest()
    assert "pull owner/model-GGUF:mmproj-model-f16.gguf fetches it for --mmproj" in result.stderr
    assert f"mtp-model-Q8_0.gguf: a drafter; kvflash-run pull {REPO}:mtp-model-Q8_0.gguf" in result.stderr
    assert cli("pull", REPO, "-q").stderr == ""
    assert hub.fetched() == [("model-Q4_K_M.gguf", None)]


def test_huggingface_hub_finds_it(cli: Stage, hub: Hub, cache: Path) -> None:
    library = pytest.importorskip("huggingface_hub", reason="needs the extra hub")
    assert cli("pull", f"{REPO}:Q8_0").exit_code == 0
    for name in ("model-Q8_0-00001-of-00002.gguf", "model-Q8_0-00002-of-00002.gguf"):
        found = library.hf_hub_download(REPO, name, cache_dir=cache, local_files_only=True)
        assert Path(found).read_bytes() == FILES[name]


def test_what_huggingface_hub_has_fetched_is_not_fetched_again(cli: Stage, hub: Hub, cache: Path) -> None:
    library = pytest.importorskip("huggingface_hub", reason="needs the extra hub")
    library.hf_hub_download(REPO, "model-Q2_K.gguf", cache_dir=cache, endpoint=hub.url, revision=COMMIT)
    assert cli("pull", f"{REPO}:Q2_K").exit_code == 0
    assert hub.fetched() == [("model-Q2_K.gguf", None)]


def test_an_interrupted_download_goes_on(cli: Stage, hub: Hub, cache: Path) -> None:
    blobs = cache / "models--owner--model-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    part = blobs / f"{hashlib.sha256(LARGE).hexdigest()}.incomplete"
    part.write_bytes(LARGE[:1000])
    result = cli("pull", REPO)
    assert Path(result.stdout.strip()).read_bytes() == LARGE
    assert hub.fetched() == [("model-Q4_K_M.gguf", "bytes=1000-")]
    assert not part.exists()


@pytest.mark.parametrize("quiet", [False, True])
def test_a_terminal_shows_the_progress(hub: Hub, tmp_path: Path, quiet: bool) -> None:
    """Of a download that goes on: the bar begins where the file stopped."""
    pty = pytest.importorskip("pty", reason="needs terminals")
    blobs = tmp_path / "hub" / "models--owner--model-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(LARGE).hexdigest()}.incomplete").write_bytes(LARGE[: len(LARGE) // 2])
    ours, theirs = pty.openpty()
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))
    line = [sys.executable, "-m", "kvflash_ggml", "pull", REPO, *(["-q"] if quiet else [])]
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub")}
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # the terminal is closed
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert process.communicate(timeout=60)[0].endswith(b"/model-Q4_K_M.gguf\n")
    assert process.returncode == 0
    assert hub.fetched() == [("model-Q4_K_M.gguf", f"bytes={len(LARGE) // 2}-")]
    bars = re.findall(rb"model-Q4_K_M.gguf: +(\d+)%", shown)
    assert bars == [] if quiet else (bars[0], bars[-1]) == (b"50", b"100"), shown


def test_a_broken_connection_is_made_again(cli: Stage, hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100)
    hub.cut = 1000
    cli("pull", REPO)  # huggingface_hub 0.x leaves it to the next one
    assert Path(cli("pull", REPO).stdout.strip()).read_bytes() == LARGE
    assert hub.fetched()[1:] == [("model-Q4_K_M.gguf", "bytes=1000-")]


def test_the_token_is_sent(cli: Stage, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert cli("pull", REPO).exit_code == 0
    assert {token for *_, token in hub.asked} == {"Bearer hf_secret"}


def test_the_token_does_not_leave_the_hub(cli: Stage, hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large files are at another host, which has to go on where a download stopped."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.moved = True
    blobs = cache / "models--owner--model-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(LARGE).hexdigest()}.incomplete").write_bytes(LARGE[:1000])
    assert Path(cli("pull", REPO).stdout.strip()).read_bytes() == LARGE
    assert hub.fetched() == [("model-Q4_K_M.gguf", "bytes=1000-")]
    elsewhere = {token for _, path, _, token in hub.asked if path.startswith("/cdn/")}
    assert elsewhere == {None}


def test_variables_of_a_process(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh process, with HF_HOME instead of HF_HUB_CACHE, and then offline."""
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    line = [sys.executable, "-m", "kvflash_ggml", "pull", f"{REPO}:Q2_K"]
    first = subprocess.run(line, capture_output=True, text=True, check=False)
    assert first.stdout == f"{snapshot(tmp_path / 'home' / 'hub')}/model-Q2_K.gguf\n", first.stderr
    ours = (f"/api/models/{REPO}", f"/{REPO}/resolve/")
    assert [path for _, path, *_ in hub.asked if not path.startswith(ours)] == [], "docs name what is asked"
    hub.asked.clear()
    offline = subprocess.run(
        line, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    assert offline.stdout == first.stdout
    assert "HF_HUB_OFFLINE is set" in offline.stderr
    assert hub.asked == []


@pytest.mark.parametrize("status", [401, 503])
def test_what_is_there_is_used_without_the_hub(cli: Stage, hub: Hub, status: int) -> None:
    first = cli("pull", REPO)
    hub.status = status
    again = cli("pull", REPO)
    assert (again.exit_code, again.stdout) == (0, first.stdout)
    assert f"answers {status} for {REPO}" in again.stderr
    assert "the copy in" in again.stderr
    assert cli("pull", f"{REPO}:Q8_0").exit_code == 1


# --- hubs that answer something else


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (401, "set HF_TOKEN"),
        (403, "set HF_TOKEN"),
        (404, "see whether the name is right"),
        (429, "wait some minutes"),
        (500, "try again later"),
        (400, "HF_ENDPOINT"),
    ],
)
def test_a_hub_that_refuses(cli: Stage, hub: Hub, status: int, remedy: str) -> None:
    hub.status = status
    result = cli("pull", REPO)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"{hub.url} answers {status} for {REPO}: " in result.stderr
    assert remedy in result.stderr


@pytest.mark.parametrize("page", ["<html>Log in</html>", "[]", '{"siblings": 3}', '{"siblings": [{}]}', "{}"])
def test_a_page_is_no_hub(cli: Stage, hub: Hub, page: str) -> None:
    hub.status, hub.page = 200, page
    result = cli("pull", REPO)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "see what HF_ENDPOINT says" in result.stderr


def test_nobody_answers(cli: Stage, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    result = cli("pull", REPO)
    assert result.exit_code == 1
    assert "http://127.0.0.1:9 cannot be reached" in result.stderr


def nothing_is_there(cache: Path) -> bool:
    return not [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_hostile_paths_stay_in_the_folder(cli: Stage, hub: Hub, cache: Path) -> None:
    hub.files = {"../../../../out-Q4_K_M.gguf": LARGE}
    assert "leads out of the repository" in cli("pull", REPO).stderr
    hub.files, hub.etag = dict(FILES), "../../../out"
    assert "names no file" in cli("pull", REPO).stderr
    hub.etag, hub.commit = None, "../../out"
    assert "is no commit" in cli("pull", REPO).stderr
    assert nothing_is_there(cache.parent)


def test_wrong_sizes(cli: Stage, hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.sizes = {"model-Q4_K_M.gguf": 7}
    assert f"has 7 bytes, and lists it with {len(LARGE)}" in cli("pull", REPO).stderr
    monkeypatch.setattr(Hub, "described", _without_sizes)
    assert "sends another length of model-Q4_K_M.gguf than the 7 bytes it named" in cli("pull", REPO).stderr
    assert nothing_is_there(cache)


def _without_sizes(hub: Hub) -> dict[str, Any]:
    return {"id": hub.repo, "sha": hub.commit, "siblings": [{"rfilename": name} for name in hub.files]}


def test_an_incomplete_file_that_is_too_long(cli: Stage, hub: Hub, cache: Path) -> None:
    blobs = cache / "models--owner--model-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(LARGE).hexdigest()}.incomplete").write_bytes(LARGE + LARGE)
    assert "try again" in cli("pull", REPO).stderr
    assert cli("pull", REPO).exit_code == 0


def test_a_page_in_place_of_a_file(cli: Stage, hub: Hub, cache: Path) -> None:
    hub.files["model-Q4_K_M.gguf"] = b"<html>Log in</html>"
    assert "it begins with b'<htm' instead of b'GGUF'" in cli("pull", REPO).stderr
    assert nothing_is_there(cache)


def test_without_the_extra(cli: Stage, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvflash_ggml.cli.download", raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    result = cli("pull", REPO)
    assert result.exit_code == 1
    assert "needs the package huggingface_hub, which is not installed: pip install" in result.stderr
    assert "[hub]" in result.stderr


# --- what is on the disk


def laid_out(cache: Path, names: list[str], commit: str = COMMIT) -> None:
    """Files as the hub's cache folder has them."""
    folder = cache / "models--owner--model-GGUF"
    for name in names:
        blob, link = folder / "blobs" / name.replace("/", "_"), folder / "snapshots" / commit / name
        for path in (blob, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(SMALL)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit)


def test_list_names_what_is_there(cli: Stage, cache: Path) -> None:
    assert "kvflash-run pull OWNER/REPO" in cli("list").stdout
    assert json.loads(cli("list", "--json").stdout) == []
    laid_out(cache, [*(name for name in FILES if "Q8_0-" in name), "a/model-Q2_K.gguf", "half-00001-of-00002.gguf"])
    first = {"model": f"{REPO}:a/model-Q2_K.gguf", "bytes": 4004, "path": f"{snapshot(cache)}/a/model-Q2_K.gguf"}
    listed = json.loads(cli("list", "--json").stdout)
    assert listed[0] == first
    assert [(one["model"], one["bytes"]) for one in listed[1:]] == [(f"{REPO}:model-Q8_0-00001-of-00002.gguf", 8008)]
    assert cli("list").stdout.splitlines()[0] == f"   3.9 KiB  {first['model']}"


def test_a_listed_name_is_one_for_rm(cli: Stage, cache: Path) -> None:
    laid_out(cache, list(FILES))
    for one in json.loads(cli("list", "--json").stdout):
        assert cli("rm", one["model"]).exit_code == 0
    left = [path.name for path in cache.rglob("*") if path.is_file() and path.suffix == ".gguf"]
    assert left == []
    assert (snapshot(cache) / "README.md").is_file()
    assert json.loads(cli("list", "--json").stdout) == []


def test_other_revisions_are_found_and_removed_too(cli: Stage, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of an older revision is there as long as its repository's newest one has not replaced it."""
    laid_out(cache, ["model-Q2_K.gguf"], "f" * 40)
    laid_out(cache, ["model-Q8_0.gguf"])
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert cli("pull", f"{REPO}:Q2_K").stdout == f"{snapshot(cache).parent / ('f' * 40)}/model-Q2_K.gguf\n"
    assert len(json.loads(cli("list", "--json").stdout)) == 2
    assert cli("rm", f"{REPO}:Q2_K").exit_code == 0
    assert [path.name for path in (cache / "models--owner--model-GGUF" / "blobs").iterdir()] == ["model-Q8_0.gguf"]


def test_rm_keeps_what_has_another_name_too(cli: Stage, cache: Path) -> None:
    laid_out(cache, ["model-Q2_K.gguf"])
    other = snapshot(cache) / "same-Q3_K.gguf"
    other.symlink_to("../../blobs/model-Q2_K.gguf")
    assert cli("rm", f"{REPO}:Q2_K").exit_code == 0
    assert other.read_bytes() == SMALL


def test_rm_keeps_what_repositories_share(cli: Stage, cache: Path) -> None:
    laid_out(cache, ["model-Q2_K.gguf"])
    shared, blob = cache / "shared", cache / "models--owner--model-GGUF" / "blobs" / "model-Q2_K.gguf"
    blob.rename(shared)
    blob.symlink_to(shared)
    assert cli("rm", REPO).exit_code == 0
    assert shared.read_bytes() == SMALL
    assert not blob.is_symlink()


def test_rm_of_what_is_not_there(cli: Stage, cache: Path) -> None:
    result = cli("rm", REPO)
    assert result.exit_code == 1
    assert "kvflash-run list shows what is" in result.stderr
    laid_out(cache, ["model-Q2_K.gguf"])
    assert "the repository has Q2_K" in cli("rm", f"{REPO}:Q4_0").stderr


@pytest.mark.parametrize("name", ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_the_folder_is_that_of_the_library(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub", reason="needs the extra hub")
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv(name, "/some/folder")
    line = [sys.executable, "-c", "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"]
    told = subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()
    assert str(models.cache_dir()) == told


# --- run and serve


def test_run_takes_a_model_of_a_hub(cli: Stage, hub: Hub, cache: Path) -> None:
    result = cli("-hf", f"{REPO}:Q2_K", "hello")
    assert (result.exit_code, result.stdout) == (0, REPLY + "\n"), result.output
    assert cli.settings["model_path"] == f"{snapshot(cache)}/model-Q2_K.gguf"
    assert cli("hello", "--hf-repo", REPO).exit_code == 0


def test_serve_takes_a_model_of_a_hub(cli: Stage, hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(run, "start", lambda llm, settings, *_more, **_named: started.append(settings))
    monkeypatch.setattr(run, "listen", lambda _settings: nullcontext())
    result = cli("serve", "-hf", f"{REPO}:Q2_K")
    assert result.exit_code == 0, result.output
    assert cli.settings["model_path"] == f"{snapshot(cache)}/model-Q2_K.gguf"
    assert started[0].alias == f"{REPO}:Q2_K"


@pytest.mark.parametrize("line", [["run", "-m", "m.gguf"], ["serve", "-m", "m.gguf"], ["serve", "m.gguf"]])
def test_two_models_are_one_too_many(cli: Stage, cache: Path, line: list[str]) -> None:
    result = cli(*line, "-hf", REPO)
    assert result.exit_code == 2
    assert "the model is given twice" in result.stderr
    assert cli(*line, "-hf", "x").exit_code == 2
