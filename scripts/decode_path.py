#!/usr/bin/env python3
"""Counts the files and functions of the package that one plain decode token runs through. Needs the built library.

`python scripts/decode_path.py` prints them, indented by depth. For a plain token nothing is drafted, no chunk is
scored, and no page moves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

REPO = Path(__file__).resolve().parents[1]
MODEL = REPO / "tests" / "models" / "recall-qwen3-q8_0.gguf"
TEXT = REPO / "tests" / "text" / "stdlib-docs.txt"

if str(REPO) not in sys.path:  # run by hand; tests may be run against another package than the checkout's
    sys.path.insert(0, str(REPO))

import kvflash_ggml  # noqa: E402

PACKAGE = str(Path(kvflash_ggml.__file__).parent)

Call = tuple[int, str, str]
"""Depth, file and function."""


def calls_of(work: Callable[[], object]) -> list[Call]:
    """The calls of functions of the package that `work` makes, in their order. What C does is not seen."""
    calls: list[Call] = []
    depth = 0

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal depth
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
            return
        if event == "call":
            name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no qualified name
            calls.append((depth, code.co_filename.removeprefix(PACKAGE + "/"), name))
        depth += 1 if event == "call" else -1

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def plain_token() -> list[Call]:
    """The calls of a plain token on a pool smaller than its text, with policy qk that scores every 16 tokens."""
    pool = {"kvflash": 1024, "kvflash_policy": "qk", "kvflash_calibrate": False, "kvflash_tau": 64}
    llm = kvflash_ggml.Llama(str(MODEL), n_ctx=4096, verbose=False, n_threads=1, **pool)  # type: ignore[arg-type]
    try:
        prompt = llm.tokenize(TEXT.read_bytes()[:9000])[:1800]
        answer = llm.generate(prompt, temp=0.0)
        for _ in range(20):
            next(answer)
        found = min((calls_of(lambda: next(answer)) for _ in range(20)), key=len)
        answer.close()
        return found
    finally:
        llm.close()


def counts(calls: list[Call]) -> tuple[int, int]:
    """How many files and how many functions these calls are of."""
    return len({file for _, file, _ in calls}), len({(file, name) for _, file, name in calls})


def main() -> None:
    calls = plain_token()
    for depth, file, name in calls:
        print("  " * depth + f"{file} {name}")
    files, functions = counts(calls)
    print(f"{files} files, {functions} functions, {len(calls)} calls")


if __name__ == "__main__":
    main()
