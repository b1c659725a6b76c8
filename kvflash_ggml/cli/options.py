"""The options, in groups that verbs can share. Each group arrives as one dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import click

from ..constants import KV_TYPES, MAX_CONTEXT
from .sections import collected, option
from .types import Layers, Number, TokenLimit

_model = option("Model")
_sampling = option("Sampling")
_output = option("Output")

CACHE_TYPE = click.Choice(list(KV_TYPES))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOptions:
    """How the weights are loaded."""

    n_gpu_layers: int | Literal["auto"]
    threads: int | None
    repack: bool
    mmap: bool
    mlock: bool
    rpc: str | None
    rpc_trust: bool

    def settings(self) -> dict[str, Any]:
        """Keywords of `Llama` for what was given, less the layers on the GPU."""
        given: dict[str, Any] = {}
        if not self.repack:
            given["use_extra_bufts"] = False
        if not self.mmap:
            given["use_mmap"] = False
        if self.mlock:
            given["use_mlock"] = True
        if self.threads is not None:
            given["n_threads"] = given["n_threads_batch"] = self.threads
        if self.rpc is not None:
            given |= {"rpc": self.rpc, "rpc_trust": self.rpc_trust}
        return given


_WEIGHTS = (
    _model(
        "-ngl",
        "--n-gpu-layers",
        "--gpu-layers",
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
    _model(
        "--mmap/--no-mmap",
        default=True,
        help="Map the file into memory, or read it into memory.  [default: mmap]",
    ),
    _model("--mlock", is_flag=True, help="Keep the weights in memory: the system must not swap them out."),
)

weight_options = collected("loading", WeightOptions, *_WEIGHTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(WeightOptions):
    """How the weights are loaded, and the context that is made for them."""

    ctx_size: int
    batch_size: int | None
    ubatch_size: int | None
    threads_batch: int | None
    cache_type_k: str | None
    cache_type_v: str | None
    flash_attn: str

    def settings(self) -> dict[str, Any]:
        given = WeightOptions.settings(self) | {"n_ctx": self.ctx_size, "flash_attn": self.flash_attn != "off"}
        options = {
            "n_batch": self.batch_size,
            "n_ubatch": self.ubatch_size,
            "n_threads_batch": self.threads_batch,
            "type_k": None if self.cache_type_k is None else KV_TYPES[self.cache_type_k],
            "type_v": None if self.cache_type_v is None else KV_TYPES[self.cache_type_v],
        }
        return given | {name: value for name, value in options.items() if value is not None}


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
        "-tb",
        "--threads-batch",
        type=click.IntRange(min=1),
        metavar="N",
        help="CPU threads that read a prompt.  [default: as -t]",
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
    *_WEIGHTS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOptions:
    """The samplers. The defaults are llama.cpp's."""

    temp: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float

    def settings(self) -> dict[str, Any]:
        """By the names of `Llama`'s methods and of requests."""
        return {
            "temperature": self.temp,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repeat_penalty": self.repeat_penalty,
        }


_SAMPLERS = (
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
)

sampler_options = collected("sampling", SamplerOptions, *_SAMPLERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions(SamplerOptions):
    """The samplers, the length of an answer, and the seed."""

    max_tokens: int
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
    *_SAMPLERS,
    _sampling(
        "--seed",
        type=click.IntRange(-1, 0xFFFFFFFF),
        default=-1,
        metavar="N",
        help="Seed of the random numbers; -1 is a random one.  [default: -1]",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """What is printed on stderr."""

    verbose: bool
    quiet: bool


_LOG = (
    _output("-v", "--verbose", is_flag=True, help="llama.cpp's log, and tracebacks, on stderr."),
    _output("-q", "--quiet", is_flag=True, help="Nothing but errors on stderr."),
)

log_options = collected("log", LogOptions, *_LOG)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions(LogOptions):
    """What is printed, and where."""

    as_json: bool
    stream: bool


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
    *_LOG,
)
