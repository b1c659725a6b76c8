"""`kvflash-bench seats`: several sequences on one pool, beside upstream's own programs in the same run."""

from __future__ import annotations

import json
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kvflash_ggml.constants import CHUNK, round_up
from kvflash_ggml.errors import KVFlashError

from . import clients, report, sessions, stock
from .load import cut
from .opening import opened
from .outcomes import Plan as Trials
from .plans_texts import Seats
from .servers import text_tokens
from .sockets import Server, serve_options, served

if TYPE_CHECKING:
    from . import together

Row = dict[str, Any]

OURS, STOCK = "ours", "stock"
STRICT = "strict"

LEAST_SHARE = 512
"""Tokens of the pool for a client, at least."""


def run(model: str, plan: Seats, options: dict[str, Any]) -> None:
    measures: dict[str, Callable[[str, Seats, dict[str, Any]], list[Row]]] = {
        "decode": _decode, "clients": _clients, "outgrow": _outgrow, "gap": _gap, "recall": _recall,
        "latency": _latency, "agents": _agents, "long": _long, "draw": _draw,
    }  # fmt: skip
    found: dict[str, list[Row]] = {}
    for question in plan.questions:
        found[question] = measures[question](model, plan, options)
        click.echo(question)
        report.rows(found[question])
    with opened(model, n_ctx=512, options=options, pool=512, policy="qk") as llm:
        device = llm.kvflash.banner() if llm.kvflash else ""
    report.told("seats", model, options | asdict(plan), device, **found)


def _tell(**now: Any) -> None:
    click.echo(json.dumps(now), err=True)


# --- steps of several sequences, without a server


def _decode(model: str, plan: Seats, options: dict[str, Any]) -> list[Row]:
    """The medians of each batch. of_stock: at the same batch. gain: over one sequence of its own."""
    from . import together  # here: it needs the library

    shape: dict[str, Any] = {"length": plan.length, "decode": plan.steps, "options": options}
    found: list[Row] = []
    for count in plan.batches:
        ours, its, share = [], [], plan.share if plan.pool is None else plan.pool // count
        for repeat in range(plan.repeats):
            ours.append(together.pace(model, count, share=share, seed=plan.seed + repeat, **shape))
            if plan.stock is not None:
                its.append(stock.pace(plan.stock, model, count, share=share, **shape))
            _tell(sequences=count, ours=ours[-1].tps, stock=its[-1] if its else None)
        tps = statistics.median(one.tps for one in ours)
        known = [rate for rate in its if rate is not None]
        of_stock = statistics.median(known) if known else None
        found.append({
            "sequences": count,
            "tps": tps,
            "stock_tps": of_stock,
            "of_stock": None if of_stock is None else tps / of_stock,
            "stock_refused": len(its) - len(known),
            "python_us": statistics.median(one.python_us for one in ours),
            "look_us": statistics.median(one.look_us for one in ours),
            "page_ins": max(one.page_ins for one in ours),
        })  # fmt: skip
    for row in found:
        for name, rate in (("gain", "tps"), ("stock_gain", "stock_tps")):
            first = found[0][rate]
            row[name] = None if row[rate] is None or first is None else row[rate] / first
    return found


def _long(model: str, plan: Seats, options: dict[str, Any]) -> list[Row]:
    """Texts of each of `lengths`: on a pool that has `share` tokens of each, on one that holds them whole as a full
    cache does, and in stock's cache. of_full, of_stock: tokens a second over theirs. What has no memory for the most
    texts is tried with the next smaller number.
    """
    found = []
    for length in plan.lengths or (plan.length,):
        pool, full = (_kept(model, plan, options, length, share) for share in (plan.share, length * 2))
        theirs: dict[int, float] = {}
        if plan.stock is not None:
            theirs = stock.kept_paces(
                plan.stock, model, plan.batches, length=length, decode=plan.steps, options=options
            )  # fmt: skip
        for count in plan.batches:
            its = theirs.get(count)
            mine, whole = (one.paces.get(count) if one else None for one in (pool, full))
            row: Row = {"length": length, "sequences": count}
            for name, one, pace in (("", pool, mine), ("full_", full, whole)):
                row[f"{name}tps"] = pace.tps if pace else None
                row[f"{name}kv_mib"] = one.device_bytes / max(one.paces) * count / 2**20 if one and pace else None
            row["stock_tps"] = its
            row["of_full"] = mine.tps / whole.tps if mine and whole else None
            row["of_stock"] = mine.tps / its if mine and its else None
            row |= {"swap_s": pool.swap_s, "look_us": mine.look_us, "page_ins": mine.page_ins} if pool and mine else {}
            found.append(row)
            _tell(**row)
    return found


def _kept(model: str, plan: Seats, options: dict[str, Any], length: int, share: int) -> together.Kept | None:
    """None if there is no memory for the fewest texts."""
    from . import together  # here: it needs the library

    counts = sorted(plan.batches)
    while counts:
        try:
            return together.kept(
                model, counts, length=length, share=share, decode=plan.steps, seed=plan.seed, options=options
            )
        except MemoryError as err:
            _tell(length=length, share=share, sequences=counts.pop(), error=str(err))
    return None


def _draw(model: str, plan: Seats, options: dict[str, Any]) -> list[Row]:
    """Processor time of a draw. whole_us: from a list of all tokens. same: draws of the same token in both ways."""
    from . import together  # here: it needs the library

    rows = plan.steps * plan.repeats
    return [
        asdict(one) | {"gain": one.whole_us / one.draw_us}
        for one in together.draws(model, rows, seed=plan.seed, options=options)
    ]


def _recall(model: str, plan: Seats, options: dict[str, Any]) -> list[Row]:
    """Of the same questions. same: answered right alone and together, or wrong both times."""
    from . import together  # here: it needs the library

    trials = Trials(tasks=(plan.task,), depths=(0.5,), trials=plan.trials, seed=plan.seed, fact_set="confirm")
    lengths = plan.lengths or (plan.length,)
    arms = [(1, STRICT), *((count, rule) for count in plan.batches if count > 1 for rule in plan.rules)]
    found, alone = [], list[list[bool]]()
    for count, rule in arms:
        right = together.recalled(
            model, count, trials, plan.filler(), lengths=lengths, share=plan.share, rule=rule, most=plan.asks,
            options=options,
        )  # fmt: skip
        alone = alone or right
        pairs = [pair for both in zip(alone, right, strict=True) for pair in zip(*both, strict=True)]
        found.append({
            "sequences": count, "rule": rule, "asked": len(pairs), "right": sum(its for _, its in pairs),
            "same": sum(a == b for a, b in pairs),
            "right_by_length": [sum(map(sum, right[i :: len(lengths)])) for i in range(len(lengths))],
        })  # fmt: skip
        _tell(**found[-1])
    return found


# --- clients of servers


@contextmanager
def _server(
    model: str, plan: Seats, options: dict[str, Any], arm: str, *, cells: int, parallel: int, n_ctx: int | None = None
) -> Iterator[Server]:
    if arm == OURS:
        sizes = serve_options(options, pool=cells, n_ctx=cells if n_ctx is None else n_ctx)
        line = [*sizes, "-np", str(parallel), *shlex.split(plan.serve)]
        with served(model, line) as server:
            yield server
        return
    assert plan.stock is not None
    with stock.served(plan.stock, model, cells=cells, parallel=parallel, options=options) as server:
        yield server


def _in_turns(
    model: str, plan: Seats, options: dict[str, Any], measure: Callable[[Server, int], Row], *,
    cells: int, parallel: int,
) -> list[Row]:  # fmt: skip
    """Ours and stock's, one after the other, as often as is asked for: with a server of its own each time."""
    found = []
    for repeat in range(plan.repeats):
        for arm in (OURS, STOCK) if plan.stock is not None else (OURS,):
            with _server(model, plan, options, arm, cells=cells, parallel=parallel) as server:
                clients.ask(server, [1] * 8, 4)  # warm
                found.append({"arm": arm, "repeat": repeat, **measure(server, repeat)})
            _tell(**found[-1])
    return found


def _prompts(text: Sequence[int], count: int, size: int, seed: int) -> list[list[int]]:
    """From different places of the text."""
    return [cut(text, (seed * count + i) * len(text) // (3 * count) + 17 * seed, size) for i in range(count)]


def _clients(model: str, plan: Seats, options: dict[str, Any]) -> list[Row]:
    """`clients.compared`, and of_stock: our gain as a share of stock's in the same repeat."""
    text = text_tokens(model, plan.filler(), options)
    cells = plan.clients * max(LEAST_SHARE, round_up(plan.prompt + plan.answer + CHUNK, CHUNK))

    def measure(server: Server, repeat: int) -> Row:
        return clients.compared(server, _prompts(text, plan.clients, plan.prompt, plan.seed + repeat), plan.answer)

    found = _in_turns(model, plan, options, measure, cells=cells, parallel=plan.clients)
    its = {row["repeat"]: row["gain"] for row in found if row["arm"] == STOCK}
    for row in found:
        gain = its.get(row["repeat"])
        row["of_stock"] = row["gain"] / gain if row["arm"] == OURS and row["gain"] and gain else None
    return found


def _outgrow(model: str, plan: Seats, options: dict[str, Any]) -> list[Row]:
    """`clients.compared` of chats that have room one by one, and none together."""
    text = text_tokens(model, plan.filler(), options)
    prompt, answer = plan.cells * 28 // 100, plan.cells * 18 // 100

    def measure(server: Server, repeat: int) -> Row:
        return clients.compared(server, _prompts(text, plan.chats, prompt, plan.seed + repeat), answer)

    return _in_turns(model, plan, options, measure, cells=plan.cells, parallel=plan.chats)


def _gap(model: str, plan: Seats, options: dict[str, Any]) -> list[Row]:
    """`clients.gaps`. Stock's cache has room for everything."""
    text = text_tokens(model, plan.filler(), options)
    most = 4096
    cells = round_up(plan.long + plan.streams * (plan.prompt + most) + CHUNK, 256)

    def measure(server: Server, repeat: int) -> Row:
        first, *others = _prompts(text, plan.streams + 1, plan.long, plan.seed + repeat)
        return clients.gaps(server, first, [other[: plan.prompt] for other in others], most)

    return _in_turns(model, plan, options, measure, cells=cells, parallel=plan.streams + 1)


def _latency(model: str, plan: Seats, options: dict[str, Any]) -> list[Row]:
    """One client's answers by a server of one sequence and by one of each batch, in turns. of_one, cpu_of_one: the
    medians of the seconds and of the threads' seconds of an answer, over those of one sequence. The context is longer
    than the pool: else one sequence would score no chunks, and several would.
    """
    text = text_tokens(model, plan.filler(), options)
    counts = [1, *(count for count in plan.batches if count > 1)]
    cells = max(counts) * max(LEAST_SHARE, round_up(plan.prompt + plan.answer + CHUNK, CHUNK))
    spent: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    with ExitStack() as stack:
        servers = {
            count: stack.enter_context(
                _server(model, plan, options, OURS, cells=cells, parallel=count, n_ctx=2 * cells)
            )
            for count in counts
        }
        for repeat, prompt in enumerate(_prompts(text, plan.repeats + 1, plan.prompt, plan.seed)):
            for count in counts if repeat % 2 else counts[::-1]:
                before, began = servers[count].cpu_seconds(), time.perf_counter()
                asked = clients.ask(servers[count], prompt, plan.answer)
                if asked.status != 200:
                    raise KVFlashError(f"a server of {count} answers {asked.status}: {asked.why}")
                took = time.perf_counter() - began, servers[count].cpu_seconds() - before
                if repeat:  # the first one is warm-up
                    spent[count].append(took)
    found: list[Row] = []
    for count in counts:
        seconds, cpu = (statistics.median(values) for values in zip(*spent[count], strict=True))
        first = found[0] if found else {"seconds": seconds, "cpu_s": cpu}
        found.append({
            "parallel": count, "seconds": seconds, "cpu_s": cpu, "of_one": seconds / first["seconds"],
            "cpu_of_one": cpu / first["cpu_s"] if first["cpu_s"] else None,  # counted in hundredths of a second
        })  # fmt: skip
    return found


def _agents(model: str, plan: Seats, options: dict[str, Any]) -> list[Row]:
    """`sessions.told` of as many users as each batch has, and of the same sessions one after the other."""
    from .recall import cases, prompt_tokens, tail_tokens

    trials = Trials(tasks=(plan.task,), depths=(0.5,), trials=max(plan.batches), seed=plan.seed, fact_set="confirm")
    lengths, text = plan.lengths or (plan.length,), text_tokens(model, plan.filler(), options)
    made, found = list[sessions.Session](), list[Row]()
    with opened(model, n_ctx=512, options={**options, "heads": None}, vocab_only=True) as llm:
        for i in range(max(plan.batches)):
            length = lengths[i % len(lengths)]
            case = [case for *_, case in cases(llm, trials, plan.filler(), n_tokens=length)][i]
            result = max(8, length * 3 // 100)
            results = [cut(text, plan.seed + 7919 * (i * plan.turns + turn), result) for turn in range(plan.turns)]
            said = [prompt_tokens(llm, case), *results, tail_tokens(llm, case, case.asks[0])]
            made.append(sessions.Session(said, case.asks[0].is_correct))
    n_ctx = max(sum(map(len, one.said)) + (plan.turns + 2) * plan.answer for one in made) + CHUNK
    for count in plan.batches:
        both = []
        for beside in (True, False):
            mine = [one.again() for one in made[:count]]
            line = [*serve_options(options, pool=count * plan.share, n_ctx=n_ctx), "-np", str(count)]
            with served(model, [*line, *shlex.split(plan.serve)]) as server:
                users = [[one] for one in mine] if beside else [mine]
                seconds = sessions.play(server, users, plan.answer, seed=plan.seed, thinks=beside)
                lost = server.metrics()["conversations_lost_total"]
            both.append(mine)
            if beside:
                row = {"users": count, "seconds": seconds, "lost": lost}
        found.append({**row, **sessions.told(*both)})
        _tell(**found[-1])
    return found
