"""Several sequences beside stock's: what counts as an answer, and how upstream's programs are asked."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import click
import pytest

import kvflash_bench
from kvflash_bench import clients, seats, sessions, sockets, stock
from kvflash_bench.plans_texts import Seats
from kvflash_bench.sockets import Reply
from kvflash_ggml.errors import ConfigError, KVFlashError

OPTIONS = {
    "n_gpu_layers": 0, "n_batch": 512, "n_ubatch": 512, "type_k": 1, "type_v": 8, "n_threads": 2,
    "use_extra_bufts": True, "heads": None,
}  # fmt: skip


def lines_of_servers(monkeypatch: pytest.MonkeyPatch, server: Any = None) -> list[list[str]]:
    """The options of each of our servers that is started from now on, which is `server`."""
    lines: list[list[str]] = []

    @contextmanager
    def served(model: str, line: list[str]) -> Iterator[Any]:
        lines.append(line)
        yield server

    monkeypatch.setattr(seats, "served", served)
    return lines


class Fake:
    """A server. ends: what becomes of requests, in turn; an answer is the number of its prompt, again and again."""

    def __init__(self, *ends: int | type[Exception], pause_s: float = 0.0) -> None:
        self._ends = itertools.cycle(ends or (200,))
        self._lock = threading.Lock()
        self._cpu = iter((1.0, 4.0, 6.0))
        self._pause_s = pause_s
        self.streamed = threading.Event()

    def cpu_seconds(self) -> float:
        return next(self._cpu)

    def ask(self, path: str, data: dict[str, Any], *, timeout_s: float) -> Reply:
        assert path == "/completion"
        assert timeout_s > sockets.PATIENCE_S, "an answer comes as a whole, from a busy machine too"
        assert data["cache_prompt"] is False
        with self._lock:
            end = next(self._ends)
        if isinstance(end, type):
            raise end
        time.sleep(self._pause_s)
        return Reply(end, {"tokens": data["prompt"][:1] * data["n_predict"]} if end == 200 else {"error": "full"}, 0.0)

    @contextmanager
    def stream(self, path: str, data: dict[str, Any]) -> Iterator[tuple[int, Iterator[Any]]]:
        def frames() -> Iterator[Any]:
            for _ in range(data["n_predict"]):
                time.sleep(0.001)
                yield {}

        yield 200, frames()


PROMPTS = [[1, 0], [2, 0], [3, 0]]


def test_answers_of_clients_are_compared() -> None:
    found = clients.compared(Fake(), PROMPTS, 4)  # type: ignore[arg-type]
    assert (found["finished_alone"], found["finished"], found["equal"], found["why"]) == (3, 3, 3, [])
    assert found["gain"] == pytest.approx(found["alone_s"] / found["together_s"])
    assert (found["alone_cpu_s"], found["together_cpu_s"]) == (3, 2)


def test_who_has_no_answer_is_counted_and_nobody_gains() -> None:
    found = clients.compared(Fake(200, 200, 200, 500, 200, ConnectionResetError), PROMPTS, 4)  # type: ignore[arg-type]
    assert (found["finished_alone"], found["finished"], found["equal"]) == (3, 1, 1)
    assert found["gain"] is None
    assert found["why"] == ["ConnectionResetError", "{'error': 'full'}"]


def test_gaps_are_those_while_the_prompt_is_read() -> None:
    found = clients.gaps(Fake(pause_s=0.1), [9] * 8, PROMPTS, 4000)  # type: ignore[arg-type]
    assert found["first_s"] >= 0.1
    assert found["tokens_meanwhile"] > 6
    assert 1 <= found["gap_ms_p50"] <= found["gap_ms_p99"] <= found["gap_ms_most"]


def test_a_long_prompt_without_an_answer() -> None:
    with pytest.raises(KVFlashError, match="not answered: 500"):
        clients.gaps(Fake(500), [9] * 8, PROMPTS, 4000)  # type: ignore[arg-type]


def written(folder: Path, name: str, script: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    file.chmod(0o755)


def pace(folder: Path) -> float | None:
    return stock.pace(folder, "m.gguf", 8, length=1024, share=512, decode=64, options=OPTIONS)


def test_the_pace_of_stock(tmp_path: Path) -> None:
    written(tmp_path, "llama-batched-bench", f'echo "$@" >{tmp_path}/line; printf main; echo \'{{"speed_tg": 12.5}}\'')
    assert pace(tmp_path) == 12.5
    line = (tmp_path / "line").read_text(encoding="utf-8")
    assert "-m m.gguf -c 4096 -kvu -npp 960 -ntg 64 -npl 8" in line
    assert "-ctk f16 -ctv q8_0 -fa on -t 2" in line


def test_weights_are_packed_by_both_or_by_none() -> None:
    for line in (stock.flags, lambda options: sockets.serve_options(options, pool=1024, n_ctx=1024)):
        assert "--no-repack" not in line(OPTIONS)
        assert "--no-repack" in line(OPTIONS | {"use_extra_bufts": False})


@pytest.mark.parametrize("size", [0, 1 << 20])
def test_an_index_of_a_size_that_is_asked_for(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvflash_bench.opening import opened
    from kvflash_bench.verb import ModelOptions
    from kvflash_ggml.llama import llama

    made: list[Any] = []
    monkeypatch.setattr(llama, "Llama", lambda model, **keywords: made.append(keywords) or MagicMock())
    options = ModelOptions(kvflash_index=size).keywords()
    assert "kvflash_index" not in ModelOptions().keywords()
    with opened("m.gguf", n_ctx=512, options=options, pool=512, policy="qk"), opened("m", n_ctx=512, options=options):
        assert made[0]["kvflash"].index == size
        assert not any("kvflash_index" in keywords for keywords in made)
    line = " ".join(sockets.serve_options(OPTIONS | {"kvflash_index": size}, pool=1024, n_ctx=1024))
    assert f"--kvflash-index {size}" in line


def test_our_server_is_asked_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of_servers(monkeypatch)
    plan = Seats(serve="--pool-share strict --kvflash-tau 64")
    with seats._server("m.gguf", plan, OPTIONS, seats.OURS, cells=4096, parallel=4):
        pass
    assert lines[0][-6:] == ["-np", "4", "--pool-share", "strict", "--kvflash-tau", "64"]


def test_one_sequence_scores_chunks_as_several_do(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Fake()
    server._cpu = itertools.count(1.0)
    lines = lines_of_servers(monkeypatch, server)
    monkeypatch.setattr(seats, "text_tokens", lambda *_: list(range(9999)))
    seats._latency("m.gguf", Seats(batches=(1, 4), repeats=1), OPTIONS)
    found = [
        (line[line.index("-np") + 1], *(int(line[line.index(name) + 1]) for name in ("-c", "--kvflash")))
        for line in lines
    ]
    assert found == [("1", 4096, 2048), ("4", 4096, 2048)]


def test_a_pool_in_all_is_shared_by_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[tuple[str, int, int]] = []

    def ours(model: str, count: int, *, share: int, **shape: Any) -> SimpleNamespace:
        shares.append(("ours", count, share))
        return SimpleNamespace(tps=1.0, python_us=1.0, look_us=1.0, page_ins=0)

    monkeypatch.setattr(kvflash_bench, "together", SimpleNamespace(pace=ours), raising=False)
    monkeypatch.setattr(stock, "pace", lambda *_, share, **__: shares.append(("stock", 0, share)))
    plan = Seats(stock=tmp_path, batches=(1, 8), length=4096, pool=4096, repeats=1)
    rows = seats._decode("m.gguf", plan, OPTIONS)
    assert shares == [("ours", 1, 4096), ("stock", 0, 4096), ("ours", 8, 512), ("stock", 0, 512)]
    assert [row["stock_refused"] for row in rows] == [1, 1]


def test_stock_that_has_no_room_or_fails(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no llama-batched-bench"):
        pace(tmp_path)
    written(tmp_path, "llama-batched-bench", "echo main: nothing fits")
    assert pace(tmp_path) is None
    written(tmp_path, "llama-batched-bench", "echo no such model >&2; exit 1")
    with pytest.raises(KVFlashError, match="no such model"):
        pace(tmp_path)


def test_the_server_of_stock(tmp_path: Path) -> None:
    written(tmp_path, "llama-server", "echo main: server is listening on http://127.0.0.1:1234 >&2; exec sleep 60")
    with stock.served(tmp_path, "m.gguf", cells=8192, parallel=4, options=OPTIONS) as server:
        assert server.port == 1234


@pytest.mark.parametrize(
    ("ends", "message"),
    [("kill -ILL $$", r"by signal 4; .* --no-repack: loading"), ("exit 3", "with status 3: loading")],
)
def test_how_a_server_of_stock_ended(ends: str, message: str, tmp_path: Path) -> None:
    written(tmp_path, "llama-server", f"echo loading >&2; {ends}")
    with (
        pytest.raises(KVFlashError, match=message),
        stock.served(tmp_path, "m.gguf", cells=8192, parallel=4, options=OPTIONS),
    ):
        pass


@pytest.mark.parametrize(
    ("words", "message"),
    [({"questions": ("decode", "speed")}, "'speed' is none of"), ({"length": 64}, "no room for 64 steps")],
)
def test_what_cannot_be_measured(words: dict[str, Any], message: str) -> None:
    with pytest.raises(click.BadParameter, match=message):
        Seats(**words).check()


def test_prompts_are_of_different_places() -> None:
    text = list(range(1000))
    found = [tuple(one) for seed in range(3) for one in seats._prompts(text, 4, 8, seed)]
    assert len(set(found)) == 12
    assert {len(one) for one in found} == {8}


# --- agents


class Agents:
    """A server that says the length of each prompt, and has read what it has not seen. status: of each answer."""

    def __init__(self, status: int = 200, most: int = 4) -> None:
        self._status, self._most = status, most
        self._known = 0
        self.asked: list[list[int]] = []

    @contextmanager
    def stream(self, path: str, data: dict[str, Any]) -> Iterator[tuple[int, Iterator[Any]]]:
        prompt = data["prompt"]
        self.asked.append(prompt)
        new = len(prompt) - self._known
        self._known = len(prompt) + data["n_predict"]
        tokens = [len(prompt)] * min(data["n_predict"], self._most)
        yield self._status, iter([{"content": "a "}, {"content": "b", "tokens": tokens, "timings": {"prompt_n": new}}])


def session(*parts: list[int]) -> sessions.Session:
    return sessions.Session(list(parts), lambda said: said == "a b")


def test_sessions_of_agents_are_told() -> None:
    mine, its = session([1] * 90, [2] * 10, [3] * 5), session([1] * 90, [2] * 10, [3] * 5)
    for one in (mine, its):
        server = Agents()
        sessions.play(server, [[one]], 2, seed=0, thinks=False)  # type: ignore[arg-type]
        assert server.asked[2] == [1] * 90 + [90] * 2 + [2] * 10 + [102] * 2 + [3] * 5
    its.answers[1] = (0, 0)
    its.last = "another"
    mine.read[1] += 21
    assert len(mine.first_s) == 3
    mine.first_s = [3.0, 1.0, 1.0]
    found = sessions.told([mine], [its])
    assert (found["turns"], found["longest"], found["equal"]) == (3, 111, 2)
    assert (found["right"], found["right_alone"]) == (1, 0)
    assert found["read_ratio"] == 126 / 105
    assert found["known"] == pytest.approx((90 / 100 + 100 / 105) / 2)
    assert found["later_s_p95"] == 1 < found["first_s_p95"] <= 3


@pytest.mark.parametrize("server", [Agents(503), Agents(most=1)])
def test_an_agent_without_an_answer(server: Agents) -> None:
    with pytest.raises(KVFlashError, match=r"answers 503|ended early"):
        sessions.play(server, [[session([1], [2])], [session([3])]], 4, seed=0, thinks=False)  # type: ignore[arg-type]


def test_stock_that_ends_is_told_with_what_it_said() -> None:
    class Gone:
        def ask(self, path: str, data: object) -> None:
            raise ConnectionResetError

        def end(self) -> str:
            return "ended by signal 6: failed to allocate"

    with pytest.raises(KVFlashError, match="llama-server has ended by signal 6: failed to allocate"):
        stock._paces(Gone(), [1, 2], [1], 4)  # type: ignore[arg-type]


def test_rules_are_named() -> None:
    with pytest.raises(click.BadParameter, match="'fair' is none of"):
        Seats(rules=("fair",)).check()
