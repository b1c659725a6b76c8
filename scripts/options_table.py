#!/usr/bin/env python3
"""Writes the table of llama-server's options into docs/options.md, from the options of `kvflash-run serve`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
PAGE = REPO / "docs" / "options.md"

if str(REPO) not in sys.path:  # run by hand; tests may be run against another package than the checkout's
    sys.path.insert(0, str(REPO))

from kvflash_ggml.cli.llama_flags import ANSWERED, SWITCHED, TAKEN  # noqa: E402
from kvflash_ggml.cli.serve import serve  # noqa: E402

BEGIN, END = "<!-- options of llama-server: scripts/options_table.py -->", "<!-- end of the options -->"


def known() -> set[str]:
    """Every spelling that `kvflash-run serve` takes or answers."""
    return {name.strip() for param in serve.params for name in (*param.opts, *param.secondary_opts)}


def upstream(source: Path) -> set[str]:
    """Every spelling that llama-server declares. source: its common/arg.cpp, where each option begins with a list."""
    found: set[str] = set()
    text = re.sub(r"(?m)^\s*//.*$", "", source.read_text(encoding="utf-8"))
    for declared in text.split("add_opt(common_arg(")[1:]:
        programs = re.search(r"set_examples\(\{([^}]*)\}", declared)
        if programs is None or "LLAMA_EXAMPLE_SERVER" in programs[1]:
            lists = re.match(r"\s*((?:\{[^{}]*\},?\s*)+)", declared)
            assert lists is not None, declared[:200]
            found.update(re.findall(r'"(--?[^"\s]+)"', lists[1]))
    return found


def render(page: str) -> str:
    """Return the page with the table as it has to be."""
    own = {name for param in serve.params if not getattr(param, "hidden", False) for name in param.opts}
    answers: dict[str, list[str]] = {"it is so anyway": [*TAKEN, *SWITCHED]}
    for names, answer in ANSWERED.items():
        answers.setdefault(answer, []).extend(name for name in names if name not in own)
    rows = [f"| {', '.join(f'`{name}`' for name in names)} | {answer} |" for answer, names in answers.items() if names]
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    head = [before + BEGIN, "| llama-server, llama-cli | `kvflash-run serve` says |", "| --- | --- |"]
    return "\n".join([*head, *rows, END + after])


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)
