"""The options that verbs share, in groups. Each group arrives as one dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..constants import KV_TYPES, MAX_CONTEXT, MAX_THREADS
from ..notation import word
from ..settings import in_section
from .sections import collected

_model = in_section("Model")
_sampling = in_section("Sampling")
_output = in_section("Output")
_snapshot = in_section("Snapshot")


def read_layers(text: str) -> int | Literal["auto"]:
    """A number of layers, 'all' (-1) or 'auto'. ValueError for any other text."""
    word = text.strip().lower()
    if word == "auto":
        return "auto"
    if word in ("all", "-1"):
        return -1
    if word.isdecimal():
        return int(word)
    raise ValueError(f"{text!r} is not a number of layers, 'auto' or 'all'")


def read_limit(text: str) -> int:
    """A number of tokens of at least 1, or -1 for no limit. ValueError for any other text."""
    word = text.strip()
    if word == "-1" or (word.isdecimal() and int(word) > 0):
        return int(word)
    raise ValueError(f"{text!r} is not a number of tokens (-1: no limit)")


@dataclass(frozen=True, kw_only=True)
class ContextOptions:
    """The context that is made for a model."""

    ctx_size: int = _model(
        int, "-c", least=0, most=MAX_CONTEXT, default=0,
        help="Logical context in tokens; 0 is the length the model was trained for.",
    )  # fmt: skip
    batch_size: int | None = _model(int, "-b", least=1, most=MAX_CONTEXT, help="Logical batch.  [default: 512]")
    ubatch_size: int | None = _model(
        int, "-ub", least=1, most=MAX_CONTEXT, help="Tokens computed at once.  [default: 512, or what --fit finds]"
    )
    threads_batch: int | None = _model(
        int, "-tb", least=1, most=MAX_THREADS, help="CPU threads that read a prompt.  [default: as -t]"
    )
    cache_type_k: str | None = _model(
        tuple(KV_TYPES), "-ctk", metavar="TYPE",
        help=f"Type of the K cache: {', '.join(KV_TYPES)}.  [default: f16, or q8_0 where --fit gains by it]",
    )  # fmt: skip
    cache_type_v: str | None = _model(
        tuple(KV_TYPES), "-ctv", metavar="TYPE", help="Type of the V cache, the same names."
    )
    flash_attn: str = _model(
        ("on", "off", "auto"), "-fa", metavar="on|off|auto", default="auto",
        help="Flash attention; a pool needs it, and auto is on.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WeightOptions:
    """How the weights are loaded."""

    n_gpu_layers: int | Literal["auto"] = _model(
        read_layers, "-ngl", "--n-gpu-layers", "--gpu-layers", default="auto", metavar="N|auto|all",
        help="Layers on the GPU; auto is what --fit finds, or all, or 0 without a GPU.",
    )  # fmt: skip
    threads: int | None = _model(int, "-t", least=1, most=MAX_THREADS, help="CPU threads.  [default: half of them]")
    rpc: str | None = _model(
        word, metavar="HOST:PORT,...",
        help="Use the devices of these servers (kvflash-run rpc serve) before those of this machine.",
    )  # fmt: skip
    rpc_trust: bool = _model(
        bool, default=False, help="Also of servers that are neither on this machine nor in a private network."
    )
    repack: bool = _model(
        bool, "--repack/--no-repack", " /-nr", default=True,
        help="Pack weights for the kernels of this CPU, or keep them as the file has them.  [default: repack]",
    )  # fmt: skip
    mmap: bool = _model(
        bool, "--mmap/--no-mmap", default=True,
        help="Map the file into memory, or read it into memory.  [default: mmap]",
    )  # fmt: skip
    mlock: bool = _model(bool, default=False, help="Keep the weights in memory: the system must not swap them out.")

    def settings(self) -> dict[str, Any]:
        """Keywords of `Llama` for what was given, less the layers on the GPU."""
        return _given(
            use_extra_bufts=None if self.repack else False,
            use_mmap=None if self.mmap else False,
            use_mlock=self.mlock or None,
            n_threads=self.threads,
            n_threads_batch=self.threads,
            rpc=self.rpc,
            rpc_trust=None if self.rpc is None else self.rpc_trust,
        )


@dataclass(frozen=True, kw_only=True)
class ModelOptions(WeightOptions, ContextOptions):
    """How the weights are loaded, and the context that is made for them."""

    def settings(self) -> dict[str, Any]:
        """Keywords of `Llama` for what was given, less the layers on the GPU."""
        return WeightOptions.settings(self) | _given(
            n_ctx=self.ctx_size,
            flash_attn=self.flash_attn != "off",
            n_batch=self.batch_size,
            n_ubatch=self.ubatch_size,
            n_threads_batch=self.threads_batch,
            type_k=None if self.cache_type_k is None else KV_TYPES[self.cache_type_k],
            type_v=None if self.cache_type_v is None else KV_TYPES[self.cache_type_v],
        )


def _given(**keywords: Any) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if value is not None}


weight_options = collected("loading", WeightOptions)
model_options = collected("loading", ModelOptions)


@dataclass(frozen=True, kw_only=True)
class SamplerOptions:
    """The samplers. The defaults are llama.cpp's."""

    temp: float = _sampling(float, "--temp", "--temperature", least=0, default=0.8, help="Temperature; 0 is greedy.")
    top_k: int = _sampling(int, least=0, most=MAX_CONTEXT, default=40, metavar="X", help="0: off.")
    top_p: float = _sampling(float, least=0, most=1, default=0.95, help="1: off.")
    min_p: float = _sampling(float, least=0, most=1, default=0.05, help="0: off.")
    repeat_penalty: float = _sampling(float, least=0, above=True, default=1.0, help="1: off.")

    def settings(self) -> dict[str, Any]:
        """By the names of `Llama`'s methods and of requests."""
        return {
            "temperature": self.temp,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repeat_penalty": self.repeat_penalty,
        }


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(SamplerOptions):
    """The samplers, the length of an answer, and the seed."""

    max_tokens: int = _sampling(
        read_limit, "-n", "--max-tokens", "--predict", "--n-predict", default=-1, metavar="N",
        help="Tokens to generate at most; -1 is until the answer ends.",
    )  # fmt: skip
    seed: int = _sampling(
        int, least=-1, most=0xFFFFFFFF, default=-1, help="Seed of the random numbers; -1 is a random one."
    )


sampler_options = collected("sampling", SamplerOptions)
sampling_options = collected("sampling", SamplingOptions)


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """What is printed on stderr."""

    verbose: bool = _output(bool, "-v", default=False, help="llama.cpp's log, and tracebacks, on stderr.")
    quiet: bool = _output(bool, "-q", default=False, help="Nothing but errors on stderr.")


@dataclass(frozen=True, kw_only=True)
class OutputOptions(LogOptions):
    """What is printed, and where."""

    as_json: bool = _output(
        bool, "--json", default=False, variable="KVFLASH_AS_JSON",
        help="One JSON document on stdout: text, usage, timings and the pool's counters.",
    )  # fmt: skip
    stream: bool = _output(bool, "--stream/--no-stream", default=True, help="Print tokens as they come, or at the end.")


log_options = collected("log", LogOptions)
output_options = collected("output", OutputOptions)


@dataclass(frozen=True, kw_only=True)
class SnapshotOptions:
    """Where a session comes from and goes to."""

    snapshot: Path | None = _snapshot(
        Path, metavar="FILE",
        help="Go on from the session in FILE, if it is there, and save the session to FILE at the end.",
    )  # fmt: skip
    snapshot_ro: bool = _snapshot(bool, default=False, help="Only read FILE, which must be there.")
    snapshot_compress: bool = _snapshot(bool, default=False, help="Save with Zstandard; needs the package zstandard.")


snapshot_options = collected("saving", SnapshotOptions)
