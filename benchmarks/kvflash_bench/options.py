"""Command-line values that several benchmarks share."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from kvflash_ggml import notation
from kvflash_ggml.constants import KV_TYPES
from kvflash_ggml.errors import KVFlashError

from .forms import SETS

POLICIES = "With ':exact' prompts are read with the whole text in view, else with what the pool holds."


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


class Bytes(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A size in bytes, with an optional K, M, G or T."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else notation.size(value)
        except ValueError as err:
            self.fail(str(err), param, ctx)


class Shares(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Per cents, separated by commas."""

    name = "per cents"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            shares = tuple(float(x) for x in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of per cents such as 6.25,3", param, ctx)
        if not all(0 <= x <= 100 for x in shares):
            self.fail(f"{value!r}: per cents lie between 0 and 100", param, ctx)
        return shares


class Factors(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Numbers above 0, separated by commas."""

    name = "factors"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            factors = tuple(float(x) for x in value.split(","))
        except ValueError:
            factors = ()
        if not factors or not all(0 < x < 1000 for x in factors):
            self.fail(f"{value!r} is not a list of numbers between 0 and 1000 such as 0.5,1,3", param, ctx)
        return factors


class Names(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Words, separated by commas."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        return value if isinstance(value, tuple) else tuple(x.strip() for x in value.split(",") if x.strip())


model_argument = click.argument("model", type=click.Path(exists=True, dir_okay=False))

text_option = click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="Text to make documents of. Default: the texts of the checkout's tests.",
)

set_option = click.option(
    "--set",
    "fact_set",
    type=click.Choice(list(SETS)),
    default="choose",
    show_default=True,
    help="Facts and documents of forms: choose settings on one set, confirm them on the other.",
)


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options about where and how the model runs, handed on as one dict `options` (see opening)."""

    @click.option("-ub", "--ubatch-size", default=512, show_default=True)
    @click.option("-ngl", "--n-gpu-layers", default=0, show_default=True)
    @click.option("-t", "--threads", default=None, type=int)
    @click.option("-ctk", "--cache-type-k", type=click.Choice(list(KV_TYPES)), default="f16", show_default=True)
    @click.option("-ctv", "--cache-type-v", type=click.Choice(list(KV_TYPES)), default="f16", show_default=True)
    @click.option(
        "--heads",
        type=click.Path(exists=True, dir_okay=False),
        help="Retrieval heads of the policy qk, from 'kvflash-run calibrate' or 'random-model'. Else they are found.",
    )
    @functools.wraps(command)
    def run(
        *args: Any, ubatch_size: int, n_gpu_layers: int, threads: int | None, cache_type_k: str, cache_type_v: str,
        heads: str | None, **kwargs: Any,
    ) -> None:  # fmt: skip
        options = {
            "n_batch": ubatch_size,
            "n_ubatch": ubatch_size,
            "n_gpu_layers": n_gpu_layers,
            "n_threads": threads,
            "n_threads_batch": threads,
            "type_k": KV_TYPES[cache_type_k],
            "type_v": KV_TYPES[cache_type_v],
            "heads": heads,
        }
        command(*args, options=options, **kwargs)

    return run


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Show what the user can mend without a traceback."""
    try:
        yield
    except KVFlashError as err:
        raise click.ClickException(str(err)) from err
