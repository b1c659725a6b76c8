#!/usr/bin/env python3
"""Writes two tables into docs/options.md: limits of `kvflash-run serve`, and what it says to llama-server's options."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

REPO = Path(__file__).resolve().parents[1]
PAGE = REPO / "docs" / "options.md"

if str(REPO) not in sys.path:  # run by hand; tests may be run against another package than the checkout's
    sys.path.insert(0, str(REPO))

from kvflash_ggml.cli.llama_flags import ANSWERED, SWITCHED, TAKEN  # noqa: E402
from kvflash_ggml.cli.serve import serve  # noqa: E402

BEGIN, END = "<!-- options of llama-server: scripts/options_table.py -->", "<!-- end of the options -->"
LIMITS, LIMITS_END = "<!-- limits: scripts/options_table.py -->", "<!-- end of the limits -->"
SECTIONS = ("Limits", "Conversations")


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


def limits() -> list[str]:
    """Return a row for each option of SECTIONS, with the default that the help names."""
    context, rows = click.Context(serve), []
    for section in SECTIONS:
        for param in serve.params:
            record = param.get_help_record(context) if getattr(param, "section", "") == section else None
            if record is not None and isinstance(param, click.Option):
                text, _, default = record[1].partition("  [default: ")
                usual = default.removesuffix("]") or ("off" if param.is_flag else "none")
                rows.append(f"| `{record[0].replace('|', ', ')}` | {usual} | {text} |")
    return rows


def render(page: str) -> str:
    """Return the page with both tables as they have to be."""
    head = ["| option | default | |", "| --- | --- | --- |"]
    return _between(_answered(page), LIMITS, LIMITS_END, [*head, *limits()])


def _between(page: str, begin: str, end: str, lines: list[str]) -> str:
    before, _, rest = page.partition(begin)
    return "\n".join([before + begin, *lines, end + rest.partition(end)[2]])


def _answered(page: str) -> str:
    own = {name for param in serve.params if not getattr(param, "hidden", False) for name in param.opts}
    answers: dict[str, list[str]] = {"it is so anyway": [*TAKEN, *SWITCHED]}
    for names, answer in ANSWERED.items():
        answers.setdefault(answer, []).extend(name for name in names if name not in own)
    rows = [f"| {', '.join(f'`{name}`' for name in names)} | {answer} |" for answer, names in answers.items() if names]
    head = ["| llama-server, llama-cli | `kvflash-run serve` says |", "| --- | --- |"]
    return _between(page, BEGIN, END, [*head, *rows])


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)
