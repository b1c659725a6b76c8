"""A server of several models: as many are loaded as have room, and what another has read is not read again."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from support.compat_models import write_embedding
from support.harness import TEXT
from support.rounding import ON_GPU
from support.serving import Served, serve

WORDS = TEXT.read_text(encoding="utf-8").split()
POOL = 512
OPTIONS = ("--kvflash", str(POOL), "-c", "8192", "--kvflash-tau", "16", "--kvflash-calibrate", "off", "-q")

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for processes in /proc")


def linked(models: dict[str, Path], folder: Path) -> Path:
    """A folder of two models, "one" and "other"."""
    folder.mkdir()
    (folder / "one.gguf").symlink_to(models["dense"])
    (folder / "other.gguf").symlink_to(models["hybrid"])
    return folder


@pytest.fixture
def folder(models: dict[str, Path], tmp_path: Path) -> Path:
    return linked(models, tmp_path / "models")


@pytest.fixture
def sessions(tmp_path: Path) -> Path:
    return tmp_path / "sessions"


@pytest.fixture(scope="module")
def shared(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """A server that tests leave running, and its folder of models."""
    base = tmp_path_factory.mktemp("served")
    folder = linked(models, base / "models")
    with serve(None, "--models-dir", str(folder), "--session-dir", str(base / "sessions"), *OPTIONS) as server:
        yield server, folder


@pytest.fixture
def served(folder: Path, sessions: Path) -> Iterator[Served]:
    with serve(None, "--models-dir", str(folder), "--session-dir", str(sessions), *OPTIONS) as server:
        yield server


def asked(model: str, start: int, words: int = 600, **more: Any) -> dict[str, Any]:
    prompt = " ".join(WORDS[start : start + words])
    return {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **more}


def answer(served: Served, data: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt, and how many of them were known."""
    status, reply = served.post("/v1/completions", data)
    assert (status, reply.get("model")) == (200, data["model"]), reply
    return reply["usage"]["prompt_tokens"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def statuses(served: Served) -> dict[str, str]:
    return {one["id"]: one["status"]["value"] for one in served.get("/v1/models")[1]["data"]}


def children(served: Served) -> list[int]:
    pid = served.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def ends(pid: int) -> bool:
    """Whether a process ends."""
    for _ in range(600):
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_one_the_other_and_the_one_again(folder: Path, sessions: Path) -> None:
    alone = ("--models-dir", str(folder), "--session-dir", str(sessions), "--models-max", "1", *OPTIONS)
    with serve(None, *alone) as served:
        _take_turns(served, sessions)


def _take_turns(served: Served, sessions: Path) -> None:
    assert statuses(served) == {"one": "unloaded", "other": "unloaded"}
    tokens, known = answer(served, asked("one", 0))
    assert known == 0
    assert tokens > POOL, "the text does not fit the pool"
    (first,) = children(served)
    assert statuses(served) == {"one": "loaded", "other": "unloaded"}
    answer(served, asked("other", 0))
    assert ends(first)
    assert len(children(served)) == 1, "one is loaded at a time"
    assert statuses(served) == {"one": "unloaded", "other": "loaded"}
    assert list((sessions / "one" / "parked").glob("*.kvs"))
    longer, known = answer(served, asked("one", 0, words=620))
    assert known >= tokens - 1
    assert longer > tokens
    assert answer(served, asked("other", 0, words=620))[1] >= tokens - 1
    assert served.stop() == 0


@pytest.mark.skipif(ON_GPU, reason="the sizes are those of a CPU")
def test_two_of_three_have_room(models: dict[str, Path], folder: Path) -> None:
    """One that embeds beside one that answers; the one that was used longest ago leaves for the third."""
    write_embedding(models["dense"], folder / "vectors.gguf")
    # any two of them take less than 55 MiB, and all three more than 65
    memory = ("--device-memory", "CPU=60M", "--fit-target", "CPU=0", "--embedding-tokens", "256")
    with serve(None, "--models-dir", str(folder), *memory, *OPTIONS) as served:
        answer(served, asked("one", 0, 50))
        status, reply = served.post("/v1/embeddings", {"input": "hello"})
        assert (status, reply["model"]) == (200, "vectors"), "no chat model embeds"
        assert statuses(served) == {"one": "loaded", "other": "unloaded", "vectors": "loaded"}
        (kept, _) = children(served)
        tokens, known = answer(served, asked("one", 0, 60))
        assert known > tokens // 2
        assert answer(served, asked("other", 0, 50))[1] == 0
        assert statuses(served) == {"one": "loaded", "other": "loaded", "vectors": "unloaded"}
        assert kept in children(served)
        assert {one["name"] for one in served.get("/api/ps")[1]["models"]} == {"one", "other"}
        assert served.get("/props?model=one")[1]["model_alias"] == "one"
        assert served.get("/props?model=vectors")[0] == 503
        status, reply = served.post("/v1/completions", {"prompt": "hello", "max_tokens": 1})
        assert (status, reply["model"]) == (200, "other"), "the one that was used last"
        assert served.stop() == 0


@pytest.mark.slow
def test_two_clients_that_want_two_models(shared: tuple[Served, Path]) -> None:
    served, _ = shared
    replies: list[tuple[int, int]] = []

    def client(model: str, start: int) -> None:
        for words in (100, 120, 140):
            replies.append(answer(served, asked(model, start, words)))

    clients = [threading.Thread(target=client, args=args) for args in (("one", 1000), ("other", 1500))]
    for one in clients:
        one.start()
    for one in clients:
        one.join(120)
    assert len(replies) == 6
    assert sum(known > 0 for _, known in replies) >= 4, "but for the first of each, the text was known"


def test_a_stream_whose_client_leaves(shared: tuple[Served, Path]) -> None:
    served, _ = shared
    frames = served.frames("/v1/completions", asked("one", 0, 50, max_tokens=4000, stream=True))
    for _ in range(5):
        next(frames)
    frames.close()  # type: ignore[attr-defined]
    answer(served, asked("other", 0, 50))
    assert statuses(served)["other"] == "loaded"


def test_a_file_that_is_no_model(shared: tuple[Served, Path]) -> None:
    served, folder = shared
    answer(served, asked("one", 0, 300))
    (folder / "bad.gguf").write_bytes(b"GGUF" + bytes(200))
    try:
        for _ in range(2):
            status, reply = served.post("/v1/completions", asked("bad", 0, 50))
            assert (status, reply["error"]["code"]) == (503, "model_failed")
    finally:
        (folder / "bad.gguf").unlink()
    assert "'bad' could not be loaded: " in reply["error"]["message"]
    assert "bad.gguf" in reply["error"]["message"]
    assert str(folder) not in reply["error"]["message"], "where the folder is concerns its owner"
    assert answer(served, asked("one", 0, 310))[1] > 300


def test_all_are_told_to_end_within_an_answer(served: Served, sessions: Path, folder: Path) -> None:
    """As a service manager does: every process of the service gets the signal."""
    frames = served.frames("/v1/completions", asked("one", 0, 300, max_tokens=200, stream=True))
    next(frames)
    for pid in (*children(served), served.process.pid):
        os.kill(pid, signal.SIGTERM)
    assert [*frames][-1]["choices"][0]["finish_reason"] == "length", "the answer came to its end"
    assert served.process.wait(60) == 0
    with serve(None, "--models-dir", str(folder), "--session-dir", str(sessions), *OPTIONS) as again:
        assert answer(again, asked("one", 0, 300))[1] > 300


def test_a_server_that_is_killed_leaves_no_process(served: Served, sessions: Path) -> None:
    answer(served, asked("one", 0, 300))
    (child,) = children(served)
    served.process.kill()
    assert ends(child)
    assert list((sessions / "one" / "parked").glob("*.kvs")), "it has stored what it had"


def test_a_second_interrupt_leaves_no_process(served: Served, sessions: Path) -> None:
    frames = served.frames("/v1/completions", asked("one", 0, 300, max_tokens=7000, stream=True))
    next(frames)
    (child,) = children(served)
    for _ in range(2):
        served.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert served.process.wait(60) == 130
    assert ends(child)
    assert not list(sessions.rglob("*.kvs")), "it was killed, and stored nothing"


def test_a_process_that_is_killed_is_started_again(served: Served) -> None:
    answer(served, asked("one", 0, 300))
    (child,) = children(served)
    frames = served.frames("/v1/completions", asked("one", 0, 300, max_tokens=4000, stream=True))
    next(frames)
    os.kill(child, signal.SIGKILL)
    with suppress(Exception):
        assert len([*frames]) < 4000
    assert ends(child)
    for _ in range(600):
        if statuses(served)["one"] != "loaded":  # its threads end one by one
            break
        time.sleep(0.05)
    answer(served, asked("one", 0, 300))


def test_an_idle_model_is_unloaded(folder: Path) -> None:
    with serve(None, "--models-dir", str(folder), "--idle", "0.2", *OPTIONS) as served:
        tokens, _ = answer(served, asked("one", 0, 300))
        for _ in range(600):
            if not children(served):
                break
            time.sleep(0.05)
        assert statuses(served) == {"one": "unloaded", "other": "unloaded"}
        assert answer(served, asked("one", 0, 310))[1] >= tokens - 1


def test_a_response_is_found_whichever_model_was_used_last(shared: tuple[Served, Path]) -> None:
    served, _ = shared
    begun = {"model": "one", "input": "hello " * 70, "max_output_tokens": 4}
    status, first = served.post("/v1/responses", begun)
    assert status == 200, first
    answer(served, asked("other", 0, 100))
    assert served.get(f"/v1/responses/{first['id']}")[1]["output"] == first["output"]
    status, more = served.post("/v1/responses", {**begun, "model": "", "previous_response_id": first["id"]})
    assert (status, more["model"], more["usage"]["input_tokens_details"]["cached_tokens"] > 64) == (200, "one", True)
    answer(served, asked("other", 0, 100))
    place = f"http://127.0.0.1:{served.port}/v1/responses/{first['id']}"
    with urlopen(Request(place, method="DELETE")) as reply:
        assert json.load(reply)["deleted"] is True
    assert served.get(f"/v1/responses/{first['id']}")[0] == 404


def test_lines_of_the_log_name_their_model(folder: Path, tmp_path: Path) -> None:
    """Several processes write there."""
    log = tmp_path / "log"
    options = [one for one in OPTIONS if one != "-q"]
    with serve(None, "--models-dir", str(folder), "--log-file", str(log), *options) as served:
        for name in ("one", "other"):
            answer(served, asked(name, 0, 100, foo=1))
            served.post("/v1/completions", {"model": name})
        served.post("/v1/completions", {"model": "none"})
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    told = [[line for line in lines if line.get("model") == name] for name in ("one", "other", None)]
    for answered, ignored, refused in told[:2]:
        assert (answered["finish"], ignored["ignored"], refused["status"]) == ("length", ["foo"], 400)
    assert [line["status"] for line in told[2]] == [404]
    assert sum(map(len, told)) == len(lines)
