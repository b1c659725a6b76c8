"""Sessions of coding agents, as others replay them: read from files, or made of the lengths that were published.

A file has one session a line, in the schema `abench-session-jsonl-v1` of agentic-bench: `system_prompt`, and `turns`
with `input_delta` (the messages that are new), `output_tokens` and `pre_gap_ms`. Other fields are not used here.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvflash_ggml.errors import ConfigError

SHARED = 0.6
"""Of a first prompt, the part that all sessions have: tools and system prompt, 10,000 to 15,000 of 20,000 tokens."""

GAPS = ((0.86, (0.1, 1.0)), (0.95, (1.0, 10.0)), (1.0, (10.0, 30.0)))
"""How long tools take: 86 % at most a second and 95 % at most ten, as a trace of 32 coding tasks has it."""

LONGEST_GAP_S = 30.0
"""A longer one counts as this, as in agentic-bench."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """said: what is new in the prompt. answer: tokens of the answer. gap_s: seconds since the answer before."""

    said: str
    answer: int
    gap_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """system: what stands before the first turn."""

    name: str
    system: str
    turns: tuple[Turn, ...]


def read(paths: Sequence[Path]) -> list[Transcript]:
    """Return the sessions of files in their order. ConfigError for a line that is none."""
    found = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as err:
            raise ConfigError(f"cannot read sessions from {path}: {err}; unpack .zst files before") from err
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    found.append(of_document(json.loads(line)))
                except (ValueError, KeyError, TypeError, AttributeError) as err:
                    raise ConfigError(
                        f"{path}, line {number}, is no session of abench-session-jsonl-v1: {err!r}"
                    ) from err
    return found


def of_document(it: dict[str, Any]) -> Transcript:
    turns = []
    for one in it["turns"]:
        said = "".join(f"\n\n{message['role']}: {message['content']}" for message in one["input_delta"])
        gap_s = min(LONGEST_GAP_S, max(0.0, one.get("pre_gap_ms", 0.0) / 1e3))
        turns.append(Turn(said=said, answer=max(1, int(one["output_tokens"])), gap_s=gap_s))
    return Transcript(name=str(it["session_id"]), system=str(it.get("system_prompt", "")), turns=tuple(turns))


def make(
    text: str, count: int, *, start: int, end: int, known: float, answer: int, letters: float, seed: int
) -> list[dict[str, Any]]:
    """Return sessions of real text as documents of the schema. Their first prompts have `start` tokens, the last `end`.

    known: the share of each later prompt that was in the one before, or was answered to it. letters: of a token.
    ConfigError if a turn would have no new token.
    """
    sizes = [start]
    while sizes[-1] / known <= end:
        sizes.append(round(sizes[-1] / known))
    fresh = [start - round(SHARED * start), *(b - a - answer for a, b in itertools.pairwise(sizes))]
    if min(fresh) < 1:
        raise ConfigError(
            f"{start} tokens with {100 * known:g} % known leave no new ones: give a longer --start or less"
        )
    dice, made = random.Random(seed), []
    for number in range(count):
        place = number * len(text) // count + round(SHARED * start * letters)
        turns = []
        for index, (size, new) in enumerate(zip(sizes, fresh, strict=True)):
            letters_of_it = round(new * letters)
            part = _cut(text, place, letters_of_it)
            place += letters_of_it
            turns.append({
                "index": index,
                "input_delta": [{"role": "tool" if index else "user", "content": part}],
                "assistant_text": "",
                "input_tokens": size,
                "output_tokens": answer,
                "cached_tokens": size - new if index else 0,
                "pre_gap_ms": round(1e3 * gap(dice)) if index else 0,
            })  # fmt: skip
        made.append({
            "session_id": f"made-{seed}-{number}",
            "source": {"dataset": "made", "agent": "", "model": "", "trial": number},
            "system_prompt": _cut(text, 0, round(SHARED * start * letters)),
            "turns": turns,
        })  # fmt: skip
    return made


def gap(dice: random.Random) -> float:
    """Return the seconds that a tool takes."""
    which = dice.random()
    return dice.uniform(*next(seconds for share, seconds in GAPS if which < share))


def _cut(text: str, begin: int, count: int) -> str:
    """So many letters from a place on, and from the beginning again."""
    begin %= len(text)
    part = text[begin : begin + count]
    return part if len(part) == count else part + _cut(text, 0, count - len(part))
