"""Recall against residency, RULER against length, first tokens against users.

matplotlib is an optional dependency (extra `plot`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvflash_ggml import pip_line
from kvflash_ggml.errors import ConfigError

from .outcomes import wilson
from .ruler_table import PUBLISHED
from .tasks_ruler import TASKS


def check() -> None:
    """Raise ConfigError where nothing can be drawn, before hours of measuring."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as err:
        raise ConfigError(f"--plot needs matplotlib: {pip_line.install('plot')}") from err


def points(rows: Sequence[dict[str, Any]]) -> dict[tuple[int, str], list[tuple[float, int, int]]]:
    """(residency, hits, trials), all tasks together, by context and policy. The full cache is a point at 100 %.

    Tasks that the full cache answers less than half of the time are left out: they say nothing about a pool.
    """
    failed = {(r["context"], r["task"], r["label"]) for r in rows if r["policy"] == "full" and r["share"] < 0.5}
    sums: dict[tuple[int, str], dict[float, tuple[int, int]]] = {}
    for row in rows:
        if (row["context"], row["task"], row["label"]) in failed:
            continue
        at = sums.setdefault((row["context"], row["policy"]), {})
        hits, trials = at.get(row["residency"], (0, 0))
        at[row["residency"]] = (hits + row["hits"], trials + row["trials"])
    return {key: [(r, *at[r]) for r in sorted(at)] for key, at in sums.items()}


def recall(rows: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """One panel per context; bars are 95 % intervals."""
    check()
    from matplotlib.figure import Figure

    curves = points(rows)
    contexts = sorted({context for context, _ in curves})
    colours = {policy: f"C{i}" for i, policy in enumerate(dict.fromkeys(policy for _, policy in curves))}
    drawn = {}
    figure = Figure(figsize=(4.5 * len(contexts) + 0.5, 3.8), layout="constrained")
    axes = figure.subplots(1, len(contexts), sharey=True, squeeze=False)[0]
    for axis, context in zip(axes, contexts, strict=True):
        for (where, policy), curve in curves.items():
            if where != context:
                continue
            x = [residency for residency, _, _ in curve]
            y = [hits / trials for _, hits, trials in curve]
            ranges = [wilson(hits, trials) for _, hits, trials in curve]
            below = [max(0.0, share - low) for share, (low, _) in zip(y, ranges, strict=True)]
            above = [max(0.0, high - share) for share, (_, high) in zip(y, ranges, strict=True)]
            drawn[policy] = axis.errorbar(x, y, yerr=[below, above], marker="o", capsize=3, color=colours[policy])
        ticks = sorted({point[0] for (where, _), curve in curves.items() if where == context for point in curve})
        axis.set(xscale="log", xlabel="residency, % of the context", title=f"{context:,} tokens", ylim=(-0.03, 1.03))
        axis.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("questions answered right")
    figure.legend(drawn.values(), drawn.keys(), loc="outside right center")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def ruler(rows: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Averages by length, one line per cache; published ones are dashed."""
    check()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axis = figure.subplots()
    lengths = sorted({row["context"] for row in rows})
    if all(len(row["tasks"]) == len(TASKS) for row in rows):
        for name, found in PUBLISHED.items():
            known = [length for length in lengths if length in found]
            axis.plot(known, [found[length] for length in known], "--", marker=".", color="0.6", label=name)
    for name in dict.fromkeys(row["way"] for row in rows):
        some = sorted((row["context"], row["average"]) for row in rows if row["way"] == name)
        axis.plot(*zip(*some, strict=True), marker="o", label=name)
    axis.set(xscale="log", xlabel="tokens", ylabel="average of the tasks", ylim=(-3, 103), title=title)
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right center")
    figure.savefig(path, dpi=120)


def replay(rows: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Time to the first token by users, one line per server; figures at the points are requests answered of all."""
    check()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axis = figure.subplots()
    users = sorted({row["users"] for row in rows})
    for arm in dict.fromkeys(row["arm"] for row in rows):
        some = [row for row in rows if row["arm"] == arm and row["first p95"] is not None]
        axis.plot([row["users"] for row in some], [row["first p95"] for row in some], marker="o", label=arm)
        for row in some:
            told = f"{row['finished']} of {row['requests']}"
            axis.annotate(told, (row["users"], row["first p95"]), xytext=(4, 4), textcoords="offset points", fontsize=8)
    axis.set(xscale="log", xlabel="users at once", ylabel="first token, 95th percentile (s)", title=title)
    axis.set_xticks(users, [str(count) for count in users])
    axis.margins(0.15)
    axis.set_ylim(bottom=0)
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)
