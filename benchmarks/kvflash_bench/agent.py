"""`kvflash-bench agent`: a transcript that grows by tools' results, without the network."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack
from dataclasses import asdict
from tempfile import TemporaryDirectory
from typing import Any

from kvflash_ggml.errors import ConfigError, KVFlashError

from . import report, serving
from .conversing import tokens_of
from .fleet import Fleet
from .interfaces import INTERFACES, ratio, replay
from .opening import opened
from .plans_texts import Agent
from .sockets import Server, serve_options

QUIET_S = 3.0
"""Without another write the store has everything."""

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
    line = serve_options(options, pool=plan.pool, n_ctx=n_ctx)
    with TemporaryDirectory(prefix="kvflash-bench-") as folder, ExitStack() as stack:
        if plan.kill_before:
            line += ["--store", folder]
        fleet = stack.enter_context(Fleet(model, line, 1))
        asked = 0

        def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
            nonlocal asked
            (member,) = fleet.members
            if asked % plan.turns == plan.kill_before - 1:
                _wait_for_store(member.server)
                fleet.end(member, signal.SIGKILL)
            asked += 1
            assert member.server is not None
            reply = member.server.ask(path, body)
            if reply.status != 200:
                raise KVFlashError(f"{path} answered {reply.status}: {reply.body}")
            told: dict[str, Any] = reply.body
            return told

        for name in plan.interfaces:
            # a word of its own in front, so that no interface goes on from another's text
            done = replay(ask, name, system=f"{name}: {system}", results=results, most=plan.answer)
            found[name] = {"ratio": ratio(done), "turns": [asdict(turn) for turn in done]}
            killed = done[plan.kill_before - 1] if plan.kill_before else None
            rows.append([
                name, len(done), done[-1].prompt, done[-1].read, killed and killed.prompt, killed and killed.read,
                ratio(done),
            ])  # fmt: skip
    names = ["interface", "turns", "last prompt", "of it read", "prompt after the kill", "of it read", "read / new"]
    report.table(names, rows)
    report.told("agent", model, options | asdict(plan), "", interfaces=found)


def _wait_for_store(server: Server | None) -> None:
    """Return when a server has written to the store what it has."""
    assert server is not None
    written, since = -1.0, time.monotonic()
    while time.monotonic() - since < QUIET_S:
        time.sleep(QUIET_S / 10)
        if (now := server.metrics()["store_writes_total"]) != written:
            written, since = now, time.monotonic()
