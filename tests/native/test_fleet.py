"""Servers that share a store: a conversation goes on in another process as it would have in one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import TEXT
from support.serving import Served, serve

from kvflash_fleet import shared as shared_module
from kvflash_fleet.objects import FolderObjects
from kvflash_ggml import KVFlashConfig

pytestmark = pytest.mark.usefixtures("known_heads")

OPTIONS = ("--kvflash", "512", "-c", "8192", "--kvflash-tau", "16", "--kvflash-calibrate", "off")
WORDS = TEXT.read_text(encoding="utf-8").split()
TURNS = 4


def value(server: Served, name: str) -> float:
    lines = str(server.get("/metrics")[1]).splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"kvflash:{name} "))


def settled(server: Served, writes: int) -> None:
    """Wait until the server has written so many states."""
    for _ in range(3000):
        if value(server, "store_writes_total") >= writes:
            return
        threading.Event().wait(0.02)
    raise AssertionError(f"{value(server, 'store_writes_total')} states in a minute")


def asked(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The next turn after these answers."""
    prompt = " ".join(WORDS[:500])
    for turn, reply in enumerate(told, 1):
        prompt += f"{reply['choices'][0]['text']} {' '.join(WORDS[1000 * turn :][:60])}"
    return {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 3}


def said(reply: dict[str, Any]) -> tuple[Any, ...]:
    """What must be equal: the text, every probability to the last digit, and how much was read."""
    (choice,) = reply["choices"]
    return choice["text"], choice["logprobs"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def turn(server: Served, told: list[dict[str, Any]]) -> None:
    status, reply = server.post("/v1/completions", asked(told))
    assert status == 200, reply
    told.append(reply)


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_another_server_goes_on_bitwise(kind: str, models: dict[str, Path], tmp_path: Path) -> None:
    """Two servers take turns. The one ends as a server is told to, comes again, and later is killed."""
    alone: list[dict[str, Any]] = []
    with serve(models[kind], *OPTIONS, "-q") as server:
        for _ in range(TURNS):
            turn(server, alone)
        assert value(server, "page_ins_total") > 0
    shared = (*OPTIONS, "-q", "--store", str(tmp_path / "store"))
    told: list[dict[str, Any]] = []
    with ExitStack() as stack:
        other = stack.enter_context(serve(models[kind], *shared))
        with serve(models[kind], *shared) as one:
            turn(one, told)
            assert one.stop() == 0
        turn(other, told)
        settled(other, 1)
        with serve(models[kind], *shared) as one:
            turn(one, told)
            settled(one, 1)
            stack.callback(one.process.kill)
            with one.stream("/v1/completions", {**asked(told), "stream": True, "max_tokens": 4000}) as (_, frames):
                next(frames)
                one.process.kill()
        turn(other, told)
        assert [said(reply) for reply in told] == [said(reply) for reply in alone]
        assert said(told[-1])[2] > 512
        assert value(other, "store_takeovers_total") == 2
        assert value(other, "store_copies_total") == 0


def test_a_damaged_store_costs_a_reading(models: dict[str, Path], tmp_path: Path) -> None:
    shared = (*OPTIONS, "--store", str(tmp_path / "store"))
    told: list[dict[str, Any]] = []
    with serve(models["dense"], *shared) as one:
        turn(one, told)
        assert one.stop() == 0
    for place, block in enumerate(sorted((tmp_path / "store").rglob("blocks/*"))):
        data = bytearray(block.read_bytes())
        data[len(data) // 2 + place] ^= 1
        block.write_bytes(data)
    with serve(models["dense"], *shared) as other:
        turn(other, told)
        assert said(told[-1])[2] == 0
        assert value(other, "store_takeovers_total") == 0
        settled(other, 1)
    with serve(models["dense"], *shared, "-q") as third:  # what was read again was written again
        turn(third, told)
        assert said(told[-1])[2] > 512


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_turn_adds_few_bytes(
    kind: str, llama: Any, tokens: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of an earlier state lie in the same blocks of the next one: the store has them once."""
    monkeypatch.setattr(shared_module, "BLOCK", 64 << 10)
    texts = shared_module.SharedTexts(FolderObjects(tmp_path / "store"))
    llm = llama(kind, n_ctx=4096, kvflash=KVFlashConfig(pool=512, tau=16))
    base: shared_module.Head | None = None
    kept: list[set[str]] = []
    for length in (1500, 1600):
        llm.eval(tokens[llm.n_tokens : length])
        llm.save_snapshot(tmp_path / "state.kvs")
        now = np.asarray(tokens[:length], np.int32)
        draft = shared_module.Draft(id="c-0123456789abcdef", salt="", prompt=length, places=None, tokens=now, base=base)
        base = texts.publish(draft, tmp_path / "state.kvs")
        kept.append(set(base.blocks))
    sealed = 1500 // 64 * llm.kvflash.page_bytes // (64 << 10)
    assert sealed > 8
    assert len(kept[0] & kept[1]) >= sealed - 1
