"""Sessions of agents: the lengths that are made, the files that are read, and what is counted of a replay."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import draw_replay as drawn
import pytest

from kvflash_bench import plot, replay, transcripts
from kvflash_bench.replay import Asked, Play, Spoken
from kvflash_ggml.constants import POOL_STEP
from kvflash_ggml.errors import ConfigError

TEXT = "".join(chr(ord("a") + i % 26) for i in range(5000))


def made(count: int = 2, **more: Any) -> list[dict[str, Any]]:
    given = {"start": 1000, "end": 3000, "known": 0.9, "answer": 20, "letters": 1.0, "seed": 0} | more
    return transcripts.make(TEXT, count, **given)


def test_made_sessions_grow_by_what_is_not_known() -> None:
    one, two = made()
    sizes = [turn["input_tokens"] for turn in one["turns"]]
    assert sizes[0] == 1000
    assert 2700 < sizes[-1] <= 3000
    said = len(one["system_prompt"])
    for number, turn in enumerate(one["turns"]):
        said += len(turn["input_delta"][0]["content"])
        assert said == turn["input_tokens"], "letters are tokens here"
        if number:
            assert turn["cached_tokens"] / turn["input_tokens"] >= 0.9
        said += turn["output_tokens"]
    assert one["system_prompt"] == two["system_prompt"]
    assert len(one["system_prompt"]) == 600
    assert one["turns"][0]["input_delta"] != two["turns"][0]["input_delta"]
    assert one["turns"][0]["pre_gap_ms"] == 0 < one["turns"][1]["pre_gap_ms"]
    assert made() == [one, two]


def test_what_leaves_nothing_new_is_refused() -> None:
    with pytest.raises(ConfigError, match="1000 tokens with 99 % known leave no new ones"):
        made(known=0.99)


def test_tools_take_as_long_as_in_the_trace() -> None:
    dice = random.Random(1)
    seconds = [transcripts.gap(dice) for _ in range(4000)]
    assert sum(s <= 1 for s in seconds) / len(seconds) == pytest.approx(0.86, abs=0.02)
    assert sum(s <= 10 for s in seconds) / len(seconds) == pytest.approx(0.95, abs=0.02)


def test_a_file_has_one_session_a_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps(one) for one in made()) + "\n\n", encoding="utf-8")
    one, two = transcripts.read([file])
    assert (one.name, two.name) == ("made-0-0", "made-0-1")
    assert one.turns[0].said.startswith("\n\nuser: ")
    assert one.turns[1].said.startswith("\n\ntool: ")
    assert {turn.answer for turn in one.turns} == {20}


def test_a_long_gap_is_cut_and_optional_fields_may_lack(tmp_path: Path) -> None:
    turn = {"input_delta": [{"role": "user", "content": "a"}], "output_tokens": 0}
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"session_id": 7, "turns": [turn, turn | {"pre_gap_ms": 9e9}]}), encoding="utf-8")
    (one,) = transcripts.read([file])
    assert [(t.answer, t.gap_s) for t in one.turns] == [(1, 0.0), (1, transcripts.LONGEST_GAP_S)]


@pytest.mark.parametrize("line", ["{", "[]", '{"session_id": 1}', '{"session_id": 1, "turns": [{"input_delta": []}]}'])
def test_another_file_is_refused(line: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(made(1)[0]) + "\n" + line, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2, is no session of abench-session-jsonl-v1"):
        transcripts.read([file])


class Fake:
    """A server: an answer is its number in the session, again and again. At `full` tokens of a prompt it refuses."""

    def __init__(self, full: int = 10**9) -> None:
        self.full = full
        self.prompts: list[list[int]] = []

    @contextmanager
    def stream(self, path: str, data: dict[str, Any]) -> Iterator[tuple[int, Iterator[Any]]]:
        assert path == "/completion"
        prompt, most = data["prompt"], data["n_predict"]
        self.prompts.append(prompt)
        if len(prompt) >= self.full:
            yield 400, iter(())
            return
        frames: list[dict[str, Any]] = [{"tokens": [len(prompt)]} for _ in range(most)]
        frames.append({"tokens": [len(prompt)] * most, "timings": {"prompt_n": 3}})
        yield 200, iter(frames)


def spoken(*sizes: int, gap_s: float = 0.0) -> list[Spoken]:
    return [Spoken(said=tuple(range(size)), answer=2, gap_s=gap_s) for size in sizes]


def played(server: Fake, sessions: Sequence[Sequence[Spoken]], users: int = 1, **more: Any) -> Play:
    until = more.pop("until", time.monotonic() + 60)
    return replay.play(server, sessions, users, gaps=1.0, until=until)  # type: ignore[arg-type]


def test_a_turn_says_all_that_was_said_and_answered() -> None:
    server = Fake()
    done = played(server, [spoken(4, 1)])
    assert server.prompts == [[0, 1, 2, 3], [0, 1, 2, 3, 4, 4, 0]]
    told = [(one.turn, one.prompt, one.new, one.read, one.made) for one in done.asked]
    assert told == [(0, 4, 4, 3, 2), (1, 7, 1, 3, 2)]
    row = replay.told(done)
    assert (row["requests"], row["finished"], row["failed"], row["longest"], row["read"]) == (2, 2, 0, 7, 6 / 5)


def test_a_session_ends_with_a_request_that_fails() -> None:
    done = played(Fake(full=7), [spoken(4, 1, 1), spoken(5, 1)], users=2)
    row = replay.told(done)
    assert (row["requests"], row["finished"], row["failed"]) == (5, 2, 2)
    assert {one.why for one in done.asked} == {"", "status 400"}


def test_nothing_is_asked_when_the_time_is_over() -> None:
    row = replay.told(played(Fake(), [spoken(4, 1, gap_s=9.0)], until=time.monotonic() - 1))
    assert (row["requests"], row["finished"]) == (2, 0)
    assert row["first p95"] is row["later p95"] is row["read"] is None


def test_later_first_tokens_are_told_apart() -> None:
    first = Asked(turn=0, prompt=9, new=9, read=9, made=4, first_s=8.0)
    later = Asked(turn=1, prompt=12, new=1, read=1, made=4, first_s=0.5)
    done = Play(planned=3, asked=[first, later, Asked(turn=2, prompt=15, new=1, why="status 500")], seconds=2.0)
    row = replay.told(done)
    assert (row["later p50"], row["later p95"], row["tok/s"]) == (0.5, 0.5, 4.0)
    assert row["first p95"] == pytest.approx(0.5 + 0.95 * 7.5)


def test_both_servers_have_the_same_bytes() -> None:
    pool, cells = replay.sizes(10_000_000, token=1000, stage=3_000_000)
    assert (pool, cells) == (7000 // POOL_STEP * POOL_STEP, 10_000 // POOL_STEP * POOL_STEP)
    with pytest.raises(ConfigError, match=f"give --kv {3_000_000 + 2 * POOL_STEP * 1000} or more"):
        replay.sizes(3_100_000, token=1000, stage=3_000_000)


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows: list[dict[str, Any]] = [
        {"arm": arm, "users": users, "first p95": None if users == 8 and arm == "unpatched" else users / 4,
         "finished": 9, "requests": 10 * users}
        for arm in ("ours", "unpatched") for users in (1, 2, 8)
    ]  # fmt: skip
    plot.replay(rows, tmp_path / "replay.png", title="a model")
    assert (tmp_path / "replay.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_the_page_is_what_the_script_draws() -> None:
    assert drawn.PICTURE.read_text(encoding="utf-8") == drawn.render(), "run python scripts/draw_replay.py"


def test_the_picture_has_each_row_of_the_table() -> None:
    found = drawn.rows()
    assert [row.users for row in found] == [1, 2, 4, 8]
    for row in found:
        for count, seconds in zip(row.answered, row.seconds, strict=True):
            assert f">{drawn.words(count, seconds)}<" in drawn.render()
    assert drawn.words(1, "-") == "1 request"
