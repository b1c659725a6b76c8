"""The options, in groups that verbs can share. Each group arrives as one dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import click

from ..constants import KV_TYPES, MAX_CONTEXT
from .sections import collected, option
from .types import Layers, Number, TokenLimit

_model = option("Model")
_sampling = option("Sampling")
_output = option("Output")

CACHE_TYPE = click.Choice(list(KV_TYPES))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How the model is loaded."""

    ctx_size: int
    batch_size: int | None
    ubatch_size: int | None
    n_gpu_layers: int | Literal["auto"]
    threads: int | None
    cache_type_k: str | None
    cache_type_v: str | None
    flash_attn: str
    repack: bool
    rpc: str | None
    rpc_trust: bool

    @property
    def cache_types(self) -> dict[str, int]:
        """Keywords of `Llama`, for those that were given."""
        given = {"type_k": self.cache_type_k, "type_v": self.cache_type_v}
        return {name: KV_TYPES[kind] for name, kind in given.items() if kind is not None}


model_options = collected(
    "loading",
    ModelOptions,
    _model(
        "-c",
        "--ctx-size",
        type=click.IntRange(min=0, max=MAX_CONTEXT),
        default=0,
        metavar="N",
        help="Logical context in tokens; 0 is the length the model was trained for.  [default: 0]",
    ),
    _model(
        "-b",
        "--batch-size",
        type=click.IntRange(min=1),
        metavar="N",
        help="Logical batch.  [default: 512]",
    ),
    _model(
        "-ub",
        "--ubatch-size",
        type=click.IntRange(min=1),
        metavar="N",
        help="Tokens computed at once.  [default: 512, or what --fit finds]",
    ),
    _model(
        "-ngl",
        "--n-gpu-layers",
        type=Layers(),
        default="auto",
        metavar="N|auto|all",
        help="Layers on the GPU; auto is what --fit finds, or all, or 0 without a GPU.  [default: auto]",
    ),
    _model(
        "-t",
        "--threads",
        type=click.IntRange(min=1),
        metavar="N",
        help="CPU threads.  [default: half of them]",
    ),
    _model(
        "-ctk",
        "--cache-type-k",
        type=CACHE_TYPE,
        metavar="TYPE",
        help=f"Type of the K cache: {', '.join(KV_TYPES)}.  [default: f16, or q8_0 where --fit gains by it]",
    ),
    _model(
        "-ctv",
        "--cache-type-v",
        type=CACHE_TYPE,
        metavar="TYPE",
        help="Type of the V cache, the same names.",
    ),
    _model(
        "-fa",
        "--flash-attn",
        type=click.Choice(["on", "off", "auto"]),
        metavar="on|off|auto",
        default="auto",
        help="Flash attention; a pool needs it, and auto is on.  [default: auto]",
    ),
    _model(
        "--rpc",
        metavar="HOST:PORT,...",
        help="Use the devices of these servers (kvflash-run rpc serve) before those of this machine.",
    ),
    _model(
        "--rpc-trust",
        is_flag=True,
        help="Also of servers that are neither on this machine nor in a private network.",
    ),
    _model(
        "--repack/--no-repack",
        " /-nr",
        "repack",
        default=True,
        help="Pack weights for the kernels of this CPU, or keep them as the file has them.  [default: repack]",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen. The defaults are llama.cpp's."""

    max_tokens: int
    temp: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    seed: int


sampling_options = collected(
    "sampling",
    SamplingOptions,
    _sampling(
        "-n",
        "--predict",
        "--n-predict",
        "--max-tokens",
        "max_tokens",
        type=TokenLimit(),
        default=-1,
        metavar="N",
        help="Tokens to generate at most; -1 is until the answer ends.  [default: -1]",
    ),
    _sampling(
        "--temp",
        "--temperature",
        type=Number(min=0),
        default=0.8,
        metavar="X",
        show_default=True,
        help="Temperature; 0 is greedy.",
    ),
    _sampling(
        "--top-k",
        type=click.IntRange(min=0),
        default=40,
        metavar="X",
        show_default=True,
        help="0: off.",
    ),
    _sampling(
        "--top-p",
        type=Number(0, 1),
        default=0.95,
        metavar="X",
        show_default=True,
        help="1: off.",
    ),
    _sampling(
        "--min-p",
        type=Number(0, 1),
        default=0.05,
        metavar="X",
        show_default=True,
        help="0: off.",
    ),
    _sampling(
        "--repeat-penalty",
        type=Number(min=0),
        default=1.0,
        metavar="X",
        show_default=True,
        help="1: off.",
    ),
    _sampling(
        "--seed",
        type=click.IntRange(-1, 0xFFFFFFFF),
        default=-1,
        metavar="N",
        help="Seed of the random numbers; -1 is a random one.  [default: -1]",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What is printed, and where."""

    as_json: bool
    stream: bool
    verbose: bool
    quiet: bool


output_options = collected(
    "output",
    OutputOptions,
    _output(
        "--json",
        "as_json",
        is_flag=True,
        help="One JSON document on stdout: text, usage, timings and the pool's counters.",
    ),
    _output("--stream/--no-stream", default=True, help="Print tokens as they come, or at the end."),
    _output("-v", "--verbose", is_flag=True, help="llama.cpp's log, and tracebacks, on stderr."),
    _output("-q", "--quiet", is_flag=True, help="Nothing but errors on stderr."),
)
