"""Writes what verbs report: the closing line of a run, lines for people, or one JSON document."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .. import __version__
from ..errors import DoesNotFit, KVFlashError, LibraryError
from ..native import library

if TYPE_CHECKING:
    from ..llama.llama import Llama
    from .answer import TimedAnswer

DOES_NOT_FIT = 3
"""The exit code of --dry-run then."""

_WIDTH = 13

Facts = TypeVar("Facts")
"""A dataclass that describes a file."""

_COUNTERS = (
    "pool", "n_ctx", "resident", "chunks", "page_ins", "page_outs", "bytes_in", "bytes_out", "host_bytes",
    "device_bytes", "policy", "scored_every", "epoch", "type_k", "type_v", "pinned", "evicted_mass", "reading", "stage",
    "stage_bytes", "index_bytes", "streamed_steps", "streamed_bytes",
)  # fmt: skip


def say(lines: Iterable[str], document: object, *, as_json: bool, indent: int | None = None) -> None:
    """Print an answer on stdout: lines for people, or one JSON document."""
    click.echo(json.dumps(document, ensure_ascii=False, indent=indent) if as_json else "\n".join(lines))


def package_version() -> str:
    import importlib.metadata  # late: it brings the email package

    try:
        return importlib.metadata.version("kvflash-ggml")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def version_line() -> str:
    """Name the package, llama.cpp, ggml, and what the build can compute on."""
    name = f"kvflash-run {__version__}"
    try:
        info = library.build_info()
    except LibraryError:
        return f"{name} (the native library is not built: see kvflash-run doctor)"
    commit, ggml = info.get("llama_cpp_commit", "?"), info.get("ggml", "?")
    return f"{name} (llama.cpp {commit}, ggml {ggml}, {computes_on(info)})"


def computes_on(info: dict[str, Any]) -> str:
    """Return the GPU backends of a build, or CPU."""
    gpus = [name.upper() for name in info.get("backends", ()) if name not in library.HOST_BACKENDS]
    return ", ".join(gpus) or "CPU"


def closing_line(answer: TimedAnswer, stats: Any) -> str:
    """Return speeds and, with a pool, residency and transfers, in one line."""
    parts = [
        _speed("prompt", answer.evaluated, answer.prompt_per_second),
        _speed("generation", answer.generated, answer.generated_per_second),
    ]
    if answer.reused > 0 and not (stats is not None and stats.last.previewed):
        parts[0] += f" ({answer.reused} more reused)"
    if stats is not None:
        parts += residency(stats)
    if answer.interrupted:
        parts.append("interrupted")
    return "kvflash: " + " | ".join(parts)


@contextmanager
def recorded(llm: Llama, path: Path | None, *, title: str) -> Iterator[None]:
    """Record which chunks are resident when, and write that to `path` at the end, after errors too. Not for None."""
    if path is None:
        yield
        return
    assert llm.kvflash is not None
    trace = llm.kvflash.record()
    try:
        yield
    finally:
        trace.write_html(path, title=title)


def residency(stats: Any) -> list[str]:
    return [
        f"resident {stats.resident}/{stats.chunks} chunks",
        f"{stats.page_ins} recalled, {stats.page_outs} copied to the host",
        *([f"scored every {stats.scored_every} tokens"] if (stats.scored_every or 1) > 1 else []),
        *losses(stats.last),
        *drafts(stats.spec),
    ]


def losses(last: Any) -> list[str]:
    """Return what a request has lost against full attention: how its prompt was read, and what ranked its chunks."""
    parts = []
    if last.previewed:
        parts.append(f"preview: read {100 * last.read / last.previewed:.0f} % of {last.previewed:,} tokens")
    elif last.read:
        exact = last.read_whole == last.read
        parts.append("read exactly" if exact else f"read with {last.view * 100:.0f} % of the text in view")
    if last.ranked_why:
        parts.append(f"resident by the index, not by exact scores: {last.ranked_why}")
    return parts


def drafts(spec: Any) -> list[str]:
    """Return what drafts have won, or why there were none."""
    if spec is None:
        return []
    last = spec.last
    if not last.steps:
        why = spec.off or spec.idle or ("nobody proposed any" if last.plain_steps else "nothing was generated")
        return [f"drafts: none verified ({why})"]
    faster = f", {spec.speedup:.1f}x" if spec.speedup is not None else ""
    nested = None if spec.on_pool is None else spec.on_pool.last
    on_pool = f", of {_won(nested, ' on the pool')}" if nested is not None and nested.steps else ""
    replaced = [f"the whole text replaced {last.replaced} of the pool's tokens"] if last.replaced else []
    return [f"drafts by {_won(last)}{faster}{on_pool}", *replaced]


def _won(last: Any, where: str = "") -> str:
    """Return which drafters were used, and how many tokens were accepted."""
    share = f"{last.rate * 100:.0f} % accepted"
    return f"{', '.join(last.by_source)}{where}: {last.mean_length:.1f} tokens a step ({share})"


def counters(stats: Any) -> dict[str, Any] | None:
    """Return the counters of the pool, None without one."""
    if stats is None:
        return None
    last = {**asdict(stats.last), "view": stats.last.view}
    return {
        **{name: getattr(stats, name) for name in _COUNTERS},
        "devices": [asdict(device) for device in stats.devices],
        "last": last,
        "spec": spec_counters(stats.spec),
    }


def spec_counters(spec: Any) -> dict[str, Any] | None:
    """Return the counters of drafts, None without speculative decoding."""
    if spec is None:
        return None
    nested = {} if spec.on_pool is None else {"on_pool": spec_counters(spec.on_pool)}
    last = spec.last
    return {
        "types": spec.types,
        "off": spec.off,
        "idle": spec.idle,
        "speedup": spec.speedup,
        "excess_s": spec.excess,
        **asdict(last),
        "rate": last.rate,
        "mean_length": last.mean_length,
        "per_position": last.per_position,
        **nested,
    }


def document(
    answer: TimedAnswer, *, model: str, n_ctx: int, load_s: float, stats: Any, snapshot: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the result of one run for programs. Times are seconds."""
    return {
        "model": model,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "seed": answer.seed,
        "n_ctx": n_ctx,
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.generated,
            "total_tokens": answer.prompt_tokens + answer.generated,
        },
        "timings": {
            "load_s": round(load_s, 6),
            "prompt_evaluated": answer.evaluated,
            "prompt_s": round(answer.prompt_s, 6),
            "prompt_per_second": round(answer.prompt_per_second, 3),
            "generation_s": round(answer.generation_s, 6),
            "generation_per_second": round(answer.generated_per_second, 3),
        },
        "kvflash": counters(stats),
        "snapshot": snapshot,
        "version": package_version(),
    }


def _speed(what: str, tokens: int, per_second: float) -> str:
    return f"{what} {tokens} tokens" + (f", {per_second:.1f} t/s" if per_second > 0 else "")


# --- what would go where


def dry_run(path: str, settings: dict[str, Any], *, as_json: bool) -> int:
    """Print where a model would go with these keywords of `Llama`. Return the exit code: 0, or DOES_NOT_FIT."""
    found = predicted(path, settings)
    say(placement_lines(path, found), {"model": path, **found}, as_json=as_json)
    return 0 if found["fits"] else DOES_NOT_FIT


def predicted(path: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return a placement as a document with "table" and "fits"; if it does not fit, with "why". Reads no weight."""
    from ..llama.fitting import without_loading
    from ..placement.table import document, table

    try:
        placement, devices = without_loading(path, settings)
    except DoesNotFit as error:
        return {"fits": False, "device": error.device, "why": str(error)}
    return {"fits": True, "table": table(placement, devices), **document(placement, devices)}


def placement_lines(path: str, found: dict[str, Any]) -> list[str]:
    """Return what `predicted` has found, as lines for people."""
    if not found["fits"]:
        return [f"does not fit: {found['why']}"]
    stock = f"llama.cpp, with a full cache: {shlex.join(['llama-cli', '-m', path, *found['options']])}"
    return [*found["table"].split("\n"), stock]


# --- files


def tell(
    files: Iterable[Path], describe: Callable[[Path], Facts], rows: Callable[[Facts], object], *, as_json: bool
) -> bool:
    """Describe each file on stdout, and errors on stderr. Return whether all files are sound.

    rows: prints the facts of a file for people, below its name.
    """
    documents: list[dict[str, Any]] = []
    sound = True
    for path in files:
        try:
            facts = describe(path)
        except (KVFlashError, OSError) as error:
            sound = False
            click.secho(f"Error: {error}", err=True, fg="red")
            documents.append({"path": str(path), "error": str(error)})
            continue
        documents.append({**asdict(facts), "path": str(path)})  # type: ignore[call-overload]
        if not as_json:
            click.echo(click.format_filename(path))
            rows(facts)
    if as_json:
        say((), documents, as_json=True, indent=2)
    return sound


def row(name: str, text: str) -> None:
    """Print a row below the name of a file."""
    click.echo(f"  {name:{_WIDTH - 1}} {text}")
