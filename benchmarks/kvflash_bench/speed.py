"""The verbs that measure time: depth, paging, scoring, restore; and random-model, which makes something to measure."""

from __future__ import annotations

from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import click

from kvflash_ggml.constants import KV_TYPES
from kvflash_ggml.native import library

from .inside import paged
from .options import Numbers, model_argument, model_options, user_errors


@click.command()
@model_argument
@click.option("--depths", type=Numbers(), default="1K,8K,32K", show_default=True, help="Tokens in the cache.")
@click.option("--pools", type=Numbers(), default="1K", show_default=True, help="Pool sizes to compare.")
@click.option(
    "--policies",
    default="lru,qk,qk:exact",
    show_default=True,
    help="Who stays resident, one arm each; with ':exact' prompts are read with the whole text in view.",
)
@click.option("--full/--no-full", default=True, show_default=True, help="Also run the full cache.")
@click.option("--window", default=4096, show_default=True, help="Prefill is timed over so many tokens.")
@click.option("--decode", default=64, show_default=True, help="Decode steps timed at each depth.")
@model_options
def depth(
    model: str, depths: tuple[int, ...], pools: tuple[int, ...], policies: str, full: bool, window: int, decode: int,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Decode and prefill speed of the full cache and of pools, at several depths."""
    library.load()
    from . import report
    from .depth import Plan, ratios, run_arm

    plan = Plan(depths=depths, window=window, decode=decode)
    points, device = [], ""
    arms: list[tuple[int | None, str]] = [(None, "-")] if full else []
    arms += [(pool, policy) for pool in pools for policy in policies.split(",")]
    for pool, policy in arms:
        arm, where = run_arm(model, pool, policy, plan, options)
        points += arm
        device = where or device
        for p in arm:
            speeds = f"{p.decode_tps:.1f} tok/s, prefill {p.prefill_tps:.0f}"
            click.echo(f"{p.arm} {p.policy} at {p.depth}: {speeds}", err=True)
    rows = ratios(points)
    columns = {
        "arm": "arm",
        "policy": "policy",
        "depth": "depth",
        "decode_tps": "decode t/s",
        "decode_vs_full": "/full",
        "decode_vs_first": "/first",
        "decode_vs_lru": "/lru",
        "prefill_tps": "prefill t/s",
        "prefill_vs_full": "/full",
        "prefill_vs_first": "/first",
        "prefill_vs_lru": "/lru",
        "python_us": "python us",
        "looks": "looks",
        "look_ms": "look ms",
        "page_ins": "page-ins",
    }
    cells = [[row.get(key) if row.get(key) is not None else "-" for key in columns] for row in rows]
    report.table(list(columns.values()), cells)
    report.document(
        {
            "bench": "depth",
            "model": Path(model).name,
            "options": options | asdict(plan),
            "environment": report.environment(device),
            "points": rows,
        }
    )


@click.command()
@model_argument
@click.option("--pool", default=4096, show_default=True, help="Tokens.")
@click.option("--chunks", type=Numbers(), default="1,4,16,64", show_default=True, help="Chunks moved at once.")
@click.option("--lanes", is_flag=True, help="Also a plain copy of the share of each device.")
@click.option("-ngl", "--n-gpu-layers", default=0, show_default=True)
@click.option("-ctk", "--cache-type-k", type=click.Choice(list(KV_TYPES)), default="f16", show_default=True)
@click.option("-ctv", "--cache-type-v", type=click.Choice(list(KV_TYPES)), default="f16", show_default=True)
def paging(
    model: str, pool: int, chunks: tuple[int, ...], lanes: bool, n_gpu_layers: int, cache_type_k: str, cache_type_v: str
) -> None:
    """Bandwidth of page-outs and page-ins against a plain copy of the same bytes."""
    library.load()
    from kvflash_ggml.llama.llama import Llama

    from . import report
    from .paging import measure, measure_lanes

    llm = Llama(
        model, n_ctx=2 * pool, kvflash=pool, n_gpu_layers=n_gpu_layers, verbose=False,
        type_k=KV_TYPES[cache_type_k], type_v=KV_TYPES[cache_type_v],
    )  # fmt: skip
    engine = paged(llm).engine
    rows = measure(engine, chunks)
    alone = measure_lanes(engine, chunks) if lanes else []
    device = engine.info.device
    llm.close()
    report.table(["direction", "chunks", "GiB/s", "plain GiB/s", "ratio", "ms a chunk"], [astuple(row) for row in rows])
    if alone:
        report.table(["direction", "chunks", "device", "mode", "share", "plain GiB/s"], [astuple(row) for row in alone])
    report.document({"bench": "paging", "model": Path(model).name, "pool": pool, "types": [cache_type_k, cache_type_v],
                     "environment": report.environment(device), "rows": [asdict(row) for row in rows],
                     "lanes": [asdict(row) for row in alone]})  # fmt: skip


@click.command()
@model_argument
@click.option("--contexts", type=Numbers(), default="32K,128K,256K", show_default=True, help="Tokens of text.")
@click.option("--rows", type=Numbers(), default="1,8", show_default=True, help="Query rows per look.")
@click.option("--threads", type=Numbers(), default="2", show_default=True, help="Host threads.")
@click.option("--heads", type=Numbers(), default="8,0", show_default=True, help="Heads that count; 0: all.")
@click.option("-ctk", "--cache-type-k", type=click.Choice(list(KV_TYPES)), default="q8_0", show_default=True)
def scoring(
    model: str, contexts: tuple[int, ...], rows: tuple[int, ...], threads: tuple[int, ...], heads: tuple[int, ...],
    cache_type_k: str,
) -> None:  # fmt: skip
    """Time of one look of the qk policy: every key at four bits, then the real keys of the best chunks."""
    library.load()
    from kvflash_ggml.llama.llama import Llama

    from . import report
    from .scoring import measure

    llm = Llama(
        model,
        n_ctx=4096,
        kvflash=1024,
        verbose=False,
        type_k=KV_TYPES[cache_type_k],
        type_v=KV_TYPES[cache_type_k],
    )
    engine = paged(llm).engine
    if max(heads) > (most := sum(layer.n_head for layer in engine.layers)):
        raise click.BadParameter(f"{max(heads)}, but this model has {most} query heads", param_hint="--heads")
    points = measure(engine, contexts=contexts, rows=rows, threads=threads, heads=heads)
    llm.close()
    report.table(
        ["context", "rows", "threads", "heads", "index ms", "keys ms", "look ms", "index MiB"],
        [astuple(point) for point in points],
    )
    report.document(
        {
            "bench": "scoring",
            "model": Path(model).name,
            "type_k": cache_type_k,
            "environment": report.environment("CPU"),
            "points": [asdict(point) for point in points],
        }
    )


@click.command()
@model_argument
@click.option("--depths", type=Numbers(), default="8K,32K", show_default=True, help="Tokens of the texts.")
@click.option("--pool", type=Numbers(), default="2K", show_default=True, help="Tokens.")
@click.option("--rows", type=Numbers(), default="1,8,32", show_default=True, help="Tokens of the steps timed there.")
@click.option("--arms", default="full,exact,pool", show_default=True, help="Which to run.")
@model_options
def streaming(
    model: str, depths: tuple[int, ...], pool: tuple[int, ...], rows: tuple[int, ...], arms: str,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Exact reading through stages, beside the full cache and a pool that reads with a hole."""
    if len(pool) != 1:
        raise click.BadParameter("one pool at a time", param_hint="--pool")
    library.load()
    from . import report
    from .streaming import ARMS, Plan, ratios, run_arm, table

    if unknown := set(arms.split(",")) - set(ARMS):
        raise click.BadParameter(f"{min(unknown)!r} is none of {', '.join(ARMS)}", param_hint="--arms")
    plan = Plan(pool=pool[0], depths=depths, rows=rows)
    points, logits, device = [], {}, ""
    with user_errors():
        for arm in arms.split(","):
            for point, row, where in run_arm(model, arm, plan, options):
                points.append(point)
                logits[arm, point.depth] = row
                device = where or device
                click.echo(f"{arm} at {point.depth}: read in {point.prefill_s:.2f} s", err=True)
    found = ratios(points, logits)
    report.table(*table(found))
    report.document({"bench": "streaming", "model": Path(model).name, "options": options | asdict(plan),
                     "environment": report.environment(device), "points": found})  # fmt: skip


@click.command(name="random-model")
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--shape", default="27b", show_default=True, help="27b, 27b-attention, 35b-a3b, tiny or tiny-moe.")
@click.option("--words", is_flag=True, help="With a made-up vocabulary: text goes in and out, as a server needs it.")
def random_model(path: Path, shape: str, words: bool) -> None:
    """Write a random-weight GGUF with the shape of a real hybrid model, for speed measurements.

    Such a model finds nothing, so a file beside it names as many retrieval heads as a real one has.
    """
    from .shapes import SHAPES, write, write_heads

    if shape not in SHAPES:
        raise click.BadParameter(f"{shape!r} is none of {', '.join(SHAPES)}", param_hint="--shape")
    write(path, SHAPES[shape], words=words)
    heads = path.with_suffix(".heads.json")
    write_heads(heads, path, SHAPES[shape])
    click.echo(f"{path}: {path.stat().st_size / 2**30:.2f} GiB; heads for --heads in {heads}", err=True)


@click.command()
@model_argument
@click.option("--contexts", type=Numbers(), default="32K", show_default=True, help="Tokens of each text.")
@click.option("--pool", type=Numbers(), default="2K", show_default=True, help="Tokens.")
@click.option("--policy", default="qk", show_default=True, help="Who stays resident.")
@click.option("--question", default=64, show_default=True, help="Tokens asked after the text.")
@click.option("--answer", default=16, show_default=True, help="Tokens that are compared.")
@click.option("--repeats", default=3, show_default=True, help="Restored sessions; medians are reported.")
@click.option("--compress", is_flag=True, help="Save with Zstandard.")
@click.option("--fresh-process/--same-process", default=False, show_default=True, help="Where to restore.")
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="For the file, which is as large as the text's KV.  [default: the folder for temporary files]",
)
@model_options
def restore(
    model: str, contexts: tuple[int, ...], pool: tuple[int, ...], policy: str, question: int, answer: int,
    repeats: int, compress: bool, fresh_process: bool, folder: Path | None, options: dict[str, Any],
) -> None:  # fmt: skip
    """A question about a text that was saved, against reading the text again.

    Both in one run. A turn is timed to the first token of its answer; what is restored must answer as the
    session that was not interrupted.
    """
    if len(pool) != 1:
        raise click.BadParameter("one pool at a time", param_hint="--pool")
    library.load()
    import tempfile

    from . import report
    from .restore import Plan, measure

    rows, device = [], ""
    with user_errors(), tempfile.TemporaryDirectory(dir=folder) as place:
        for context in contexts:
            plan = Plan(
                context=context, pool=pool[0], policy=policy, question=question, answer=answer, repeats=repeats,
                compress=compress, options=options,
            )  # fmt: skip
            row, device = measure(model, Path(place) / "session.kvs", plan, fresh_process=fresh_process)
            rows.append(row)
            turns = f"read again {row['cold_turn_s']:.2f} s, restored {row['warm_turn_s']:.3f} s"
            click.echo(f"{context} tokens: {turns}, {row['ratio']:.1f} times", err=True)
    columns = {
        "context": "context",
        "pool": "pool",
        "read_tps": "read t/s",
        "save_blocking_s": "save blocks s",
        "save_s": "save s",
        "file_mib": "MiB",
        "restore_s": "restore s",
        "question_s": "question s",
        "question_tps": "t/s",
        "cold_turn_s": "cold turn s",
        "warm_turn_s": "warm turn s",
        "ratio": "cold/warm",
        "same_answer": "same answer",
    }
    cells = [[("no", "yes")[x] if isinstance(x := row[key], bool) else x for key in columns] for row in rows]
    report.table(list(columns.values()), cells)
    report.document({"bench": "restore", "model": Path(model).name, "fresh_process": fresh_process,
                     "compress": compress, "options": options, "environment": report.environment(device),
                     "rows": rows})  # fmt: skip
