"""`kvflash-bench`: every figure in the README comes from here. The last line of stdout is one JSON document."""

from __future__ import annotations

from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import click

CACHE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}


class Numbers(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Whole numbers with an optional K suffix (1,024), separated by commas."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(x[:-1]) * 1024 if x[-1] in "kK" else int(x) for x in value.split(","))
        except (ValueError, IndexError):
            self.fail(f"{value!r} is not a list of numbers such as 4K,64K", param, ctx)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure the paged engine. Ratios within one run are what counts; absolute figures belong to one machine."""


@main.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False))
@click.option("--depths", type=Numbers(), default="1K,8K,32K", show_default=True, help="Tokens in the cache.")
@click.option("--pools", type=Numbers(), default="1K", show_default=True, help="Pool sizes to compare.")
@click.option("--full/--no-full", default=True, show_default=True, help="Also run the full cache.")
@click.option("--window", default=4096, show_default=True, help="Prefill is timed over so many tokens.")
@click.option("--decode", default=64, show_default=True, help="Decode steps timed at each depth.")
@click.option("-ub", "--ubatch-size", default=512, show_default=True)
@click.option("-ngl", "--n-gpu-layers", default=0, show_default=True)
@click.option("-t", "--threads", default=None, type=int)
@click.option("-ctk", "--cache-type-k", type=click.Choice(list(CACHE_TYPES)), default="f16", show_default=True)
@click.option("-ctv", "--cache-type-v", type=click.Choice(list(CACHE_TYPES)), default="f16", show_default=True)
def depth(
    model: str, depths: tuple[int, ...], pools: tuple[int, ...], full: bool, window: int, decode: int,
    ubatch_size: int, n_gpu_layers: int, threads: int | None, cache_type_k: str, cache_type_v: str,
) -> None:  # fmt: skip
    """Decode and prefill speed of the full cache and of pools, at several depths."""
    _load()
    from . import report
    from .depth import Plan, ratios, run_arm

    plan = Plan(depths=depths, window=window, decode=decode)
    options = {
        "n_batch": ubatch_size,
        "n_ubatch": ubatch_size,
        "n_gpu_layers": n_gpu_layers,
        "n_threads": threads,
        "n_threads_batch": threads,
        "type_k": CACHE_TYPES[cache_type_k],
        "type_v": CACHE_TYPES[cache_type_v],
    }
    points, device = [], ""
    for pool in (*((None,) if full else ()), *pools):
        arm, where = run_arm(model, pool, plan, options)
        points += arm
        device = where or device
        for p in arm:
            click.echo(f"{p.arm} at {p.depth}: {p.decode_tps:.1f} tok/s, prefill {p.prefill_tps:.0f} tok/s", err=True)
    rows = ratios(points)
    header = ["arm", "depth", "decode t/s", "vs full", "vs first", "prefill t/s", "vs full", "vs first", "python us"]
    keys = ["arm", "depth", "decode_tps", "decode_vs_full", "decode_vs_first", "prefill_tps", "prefill_vs_full",
            "prefill_vs_first", "python_us"]  # fmt: skip
    report.table(header, [[row.get(key) if row.get(key) is not None else "-" for key in keys] for row in rows])
    report.document({"bench": "depth", "model": Path(model).name, "options": options | asdict(plan),
                     "environment": report.environment(device), "points": rows})  # fmt: skip


@main.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False))
@click.option("--pool", default=4096, show_default=True, help="Tokens.")
@click.option("--chunks", type=Numbers(), default="1,4,16,64", show_default=True, help="Chunks moved at once.")
@click.option("-ngl", "--n-gpu-layers", default=0, show_default=True)
@click.option("-ctk", "--cache-type-k", type=click.Choice(list(CACHE_TYPES)), default="f16", show_default=True)
@click.option("-ctv", "--cache-type-v", type=click.Choice(list(CACHE_TYPES)), default="f16", show_default=True)
def paging(
    model: str, pool: int, chunks: tuple[int, ...], n_gpu_layers: int, cache_type_k: str, cache_type_v: str
) -> None:
    """Bandwidth of page-outs and page-ins against a plain copy of the same bytes."""
    _load()
    from ..llama import Llama
    from . import report
    from .paging import measure

    llm = Llama(
        model, n_ctx=2 * pool, kvflash=pool, n_gpu_layers=n_gpu_layers, verbose=False,
        type_k=CACHE_TYPES[cache_type_k], type_v=CACHE_TYPES[cache_type_v],
    )  # fmt: skip
    assert llm._session is not None
    rows = measure(llm._session.engine, chunks)
    device = llm._session.engine.info.device
    llm.close()
    report.table(["direction", "chunks", "GiB/s", "plain GiB/s", "ratio", "ms a chunk"], [astuple(row) for row in rows])
    report.document({"bench": "paging", "model": Path(model).name, "pool": pool, "types": [cache_type_k, cache_type_v],
                     "environment": report.environment(device), "rows": [asdict(row) for row in rows]})  # fmt: skip


@main.command(name="random-model")
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--shape", default="27b", show_default=True, help="27b or tiny.")
def random_model(path: Path, shape: str) -> None:
    """Write a random-weight GGUF with the shape of a real hybrid model, for speed measurements."""
    from .shapes import SHAPES, write

    if shape not in SHAPES:
        raise click.BadParameter(f"{shape!r} is none of {', '.join(SHAPES)}", param_hint="--shape")
    write(path, SHAPES[shape])
    click.echo(f"{path}: {path.stat().st_size / 2**30:.2f} GiB", err=True)


def _load() -> None:
    from ..native import library

    library.load()
