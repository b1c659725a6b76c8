"""`kvflash-bench agent`: a transcript that grows by tools' results, without the network."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvflash_ggml.errors import ConfigError, KVFlashError

from . import report, serving
from .conversing import tokens_of
from .interfaces import INTERFACES, ratio, replay
from .opening import opened
from .plans_texts import Agent
from .sockets import serve_options, served

LETTERS = 4
"""Of a token, about: results are cut by letters, since servers take texts."""


def run(model: str, plan: Agent, options: dict[str, Any]) -> None:
    if plan.interfaces:
        _through(model, plan, options)
        return
    need = plan.system + plan.turns * (plan.result + plan.answer) + 64
    fields = {"tau": plan.tau, "reading": plan.reading}
    with opened(model, n_ctx=need, options=options, pool=plan.pool, policy="qk", fields=fields) as llm:
        tokens = tokens_of(llm, plan.filler(), need)
        device = llm.kvflash.banner() if llm.kvflash else ""
        with serving.served(llm, park_bytes=8 << 30, folder=None) as scheduler:  # a server's, unless it is told
            done, prompts = serving.run_agent(
                scheduler, tokens, system=plan.system, turns=plan.turns, result=plan.result, most=plan.answer,
                side_every=plan.side_every,
            )  # fmt: skip
    again: dict[int, float] = {}
    if plan.reread_every:
        plain = {name: value for name, value in options.items() if name != "heads"}
        with opened(model, n_ctx=need, options=plain) as llm:
            wanted = {*range(0, plan.turns, plan.reread_every), plan.turns - 1}
            again = {turn: serving.reread_ms(llm, prompts[turn]) for turn in sorted(wanted)}
    rows = [
        [turn.turn, "side" if turn.side else "", turn.prompt, turn.read, turn.first_ms, turn.restore_ms,
         None if turn.side else again.get(turn.turn)]
        for turn in done
    ]  # fmt: skip
    report.table(["turn", "", "prompt", "read", "first ms", "restore ms", "reread ms"], rows)
    found = {"turns": [asdict(turn) for turn in done], "reread_ms": again}
    report.told("agent", model, options | asdict(plan), device, **found)


def _through(model: str, plan: Agent, options: dict[str, Any]) -> None:
    """The transcript as texts, through a server. ConfigError for an interface that there is not."""
    unknown = sorted({*plan.interfaces} - {*INTERFACES})
    if unknown:
        raise ConfigError(f"--interfaces {unknown[0]}: there are {', '.join(INTERFACES)}")
    filler, each = plan.filler(), plan.result * LETTERS
    system, rest = filler[: plan.system * LETTERS], filler[plan.system * LETTERS :]
    results = [rest[turn * each % len(rest) :][:each] for turn in range(plan.turns)]
    n_ctx = 2 * (plan.system + plan.turns * (plan.result + plan.answer)) + 1024
    found, rows = {}, []
    with served(model, serve_options(options, pool=plan.pool, n_ctx=n_ctx)) as child:

        def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
            reply = child.ask(path, body)
            if reply.status != 200:
                raise KVFlashError(f"{path} answered {reply.status}: {reply.body}")
            told: dict[str, Any] = reply.body
            return told

        for name in plan.interfaces:
            # a word of its own in front, so that no interface goes on from another's text
            done = replay(ask, name, system=f"{name}: {system}", results=results, most=plan.answer)
            found[name] = {"ratio": ratio(done), "turns": [asdict(turn) for turn in done]}
            rows.append([name, len(done), done[-1].prompt, sum(turn.read for turn in done), ratio(done)])
    report.table(["interface", "turns", "last prompt", "read", "read / new"], rows)
    report.told("agent", model, options | asdict(plan), "", interfaces=found)
