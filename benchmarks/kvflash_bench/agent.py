"""`kvflash-bench agent`: a transcript that grows by tools' results, without the network."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from . import report, serving
from .conversing import tokens_of
from .opening import opened
from .plans_texts import Agent


def run(model: str, plan: Agent, options: dict[str, Any]) -> None:
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
