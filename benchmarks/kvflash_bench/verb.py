"""A verb from its plan: each field of a dataclass is an option of the command, and a value that it measures by."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Any

import click

from kvflash_ggml.constants import KV_TYPES
from kvflash_ggml.native import library

from .options import Bytes, user_errors

UNSAID = (None, (), "", False)
"""Defaults that --help does not show."""


def option(default: Any, help: str = "", *, names: tuple[str, ...] = (), type: Any = None, **more: Any) -> Any:
    """Return a field that is an option, too.

    default: as it is typed. names: words of the option, "--name-of-the-field" if there are none. type: of click, by
    default that of the default value. more: for `click.Option`.
    """
    typed = isinstance(type, click.ParamType) and isinstance(default, str)
    value = type.convert(default, None, None) if typed else default
    shown = not any(default is unsaid or default == unsaid == () for unsaid in UNSAID)
    settings = {"default": default, "help": help, "type": type, "show_default": shown, **more}
    return field(default=value, metadata={"names": names, "settings": settings})


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a verb measures. Its docstring is the help of the verb."""

    def check(self) -> None:
        """Raise KVFlashError or click's BadParameter for what cannot be measured, before the library is loaded."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Where and how the model runs."""

    ubatch_size: int = option(512, names=("-ub", "--ubatch-size"))
    n_gpu_layers: int = option(0, names=("-ngl", "--n-gpu-layers"))
    threads: int | None = option(None, names=("-t", "--threads"), type=int)
    cache_type_k: str = option("f16", names=("-ctk", "--cache-type-k"), type=click.Choice(list(KV_TYPES)))
    cache_type_v: str = option("f16", names=("-ctv", "--cache-type-v"), type=click.Choice(list(KV_TYPES)))
    repack: bool = option(
        True, "Pack weights for the kernels of this CPU, or keep them as the file has them: stock's programs too."
    )
    heads: str | None = option(
        None,
        "Retrieval heads of the policy qk, from 'kvflash-run calibrate' or 'random-model'. Else they are found.",
        type=click.Path(exists=True, dir_okay=False),
    )
    kvflash_index: int | None = option(
        None, "Most memory of a CUDA GPU for the index by which chunks are scored, 0 for none.", type=Bytes()
    )

    def keywords(self) -> dict[str, Any]:
        """Keywords of `Llama`, and `heads`: see `opening.opened`."""
        return {
            "n_batch": self.ubatch_size,
            "n_ubatch": self.ubatch_size,
            "n_gpu_layers": self.n_gpu_layers,
            "n_threads": self.threads,
            "n_threads_batch": self.threads,
            "type_k": KV_TYPES[self.cache_type_k],
            "type_v": KV_TYPES[self.cache_type_v],
            "use_extra_bufts": self.repack,
            "heads": self.heads,
            **({} if self.kvflash_index is None else {"kvflash_index": self.kvflash_index}),
        }


def verb(name: str, plan: type[Plan], room: str, run: str = "run", *, where: bool = True) -> click.Command:
    """Return the command that makes a plan and measures by it.

    room: the module that has the function `run(model, plan, options)`; it is imported once the native library is
    loaded. where: with `ModelOptions`, which become `options`; these are empty without.
    """
    shared = ModelOptions if where else None

    def command(model: str, **values: Any) -> None:
        given = {one.name: values.pop(one.name) for one in (() if shared is None else fields(shared))}
        keywords = {} if shared is None else shared(**given).keywords()
        with user_errors():
            made = plan(**values)
            made.check()
            library.load()
            getattr(import_module(f".{room}", __package__), run)(model, made, keywords)

    argument = click.Argument(["model"], type=click.Path(exists=True, dir_okay=False))
    params = [argument, *options_of(plan), *(options_of(shared) if shared is not None else ())]
    return click.Command(name, callback=command, params=params, help=inspect.getdoc(plan))


def options_of(plan: type) -> list[click.Parameter]:
    """The options of the fields, in their order."""
    return [_option(one.name, one.default, **one.metadata) for one in fields(plan) if one.metadata]


def _option(name: str, default: Any, *, names: tuple[str, ...], settings: dict[str, Any]) -> click.Option:
    word = name.replace("_", "-")
    names = names or (f"--{word}/--no-{word}" if default is True else f"--{word}",)
    if default is False and "/" not in names[0]:
        settings = settings | {"is_flag": True}
    return click.Option([*names, name], **settings)
