"""The options that verbs share, in groups. Each group arrives as one dataclass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

import click

from .. import notation, system
from ..config import KVFlashConfig, PoolSettings, PrefixCache, SpecConfig
from ..constants import KV_TYPES, MAX_CONTEXT, MAX_THREADS
from ..errors import ConfigError
from ..native import library
from ..notation import word
from ..placement.sizes import HOST
from ..placement.wanted import EXPERTS, parse_overrides
from ..sampling import Samplers
from ..settings import in_section, setting, settings
from .child import check_first_run
from .rope import RopeOptions
from .sections import ON_OFF, collected, option

_model = in_section("Model")
_sampling = in_section("Sampling")
_output = in_section("Output")
_snapshot = in_section("Snapshot")


def read_layers(text: str) -> int | Literal["auto"]:
    """Read a number of layers, 'all' (-1) or 'auto'. ValueError for any other text."""
    word = text.strip().lower()
    if word == "auto":
        return "auto"
    if word in ("all", "-1"):
        return -1
    if word.isdecimal():
        return int(word)
    raise ValueError(f"{text!r} is not a number of layers, 'auto' or 'all'")


MOST_PARALLEL = 256


def read_parallel(text: str) -> int | Literal["auto"]:
    """Read a number of answers, or 'auto'. ValueError for any other text."""
    word = text.strip().lower()
    if word == "auto":
        return "auto"
    if word.isdecimal() and 1 <= int(word) <= MOST_PARALLEL:
        return int(word)
    raise ValueError(f"{text!r} is not a number of answers from 1 to {MOST_PARALLEL}, or 'auto'")


def read_scaled(text: str) -> tuple[str, float]:
    """Read a file and its weight, as adapter.gguf:0.5. ValueError for any other text."""
    path, _, weight = text.rpartition(":")
    try:
        scale = float(weight) if path else math.nan
    except ValueError:
        scale = math.nan
    if not math.isfinite(scale):
        raise ValueError(f"{text!r} is not a file and its weight, as adapter.gguf:0.5")
    return path, scale


_KINDS: dict[str, Callable[[str], bool | int | float | str]] = {
    "int": int,
    "float": float,
    "bool": notation.switch,
    "str": str,
}


def read_override(text: str) -> tuple[str, bool | int | float | str]:
    """Read a field and its value, as qwen3.context_length=int:65536. ValueError for any other text."""
    key, _, typed = text.partition("=")
    kind, colon, value = typed.partition(":")
    if not (key and colon) or kind not in _KINDS:
        raise ValueError(f"{text!r} is not a field and its value, as qwen3.context_length=int:65536")
    try:
        return key, _KINDS[kind](value)
    except ValueError as err:
        raise ValueError(f"{text!r}: {value!r} is no value of the type {kind}") from err


@dataclass(frozen=True, kw_only=True)
class ContextOptions:
    """The context that is made for a model."""

    ctx_size: int = _model(
        notation.tokens, "-c", least=0, most=MAX_CONTEXT, default=0,
        help="Context in tokens, as 16K; 0 is as many as the model was trained for.",
    )  # fmt: skip
    batch_size: int | None = _model(
        notation.tokens, "-b", least=1, most=MAX_CONTEXT, help="Logical batch.  [default: 512]"
    )
    ubatch_size: int | None = _model(
        notation.tokens, "-ub", least=1, most=MAX_CONTEXT,
        help="Tokens of one step.  [default: 512, or what --fit finds]",
    )  # fmt: skip
    threads_batch: int | None = _model(
        int, "-tb", least=-1, most=MAX_THREADS, help="CPU threads that read a prompt.  [default: as -t]"
    )
    cache_type_k: str | None = _model(
        tuple(KV_TYPES), "-ctk", metavar="TYPE",
        help=f"Type of the K cache: {', '.join(KV_TYPES)}.  [default: f16, or q8_0 where --fit gains by it]",
    )  # fmt: skip
    cache_type_v: str | None = _model(tuple(KV_TYPES), "-ctv", metavar="TYPE", help="Type of the V cache; see -ctk.")
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
    threads: int | None = _model(
        int, "-t", least=-1, most=MAX_THREADS, help="CPU threads; -1: all.  [default: half of them]"
    )
    rpc: str | None = _model(
        word, metavar="HOST:PORT,...",
        help="Use the devices of these servers (kvflash-run rpc serve) before those of this machine.",
    )  # fmt: skip
    rpc_trust: bool = _model(
        bool, default=False, help="Use --rpc servers outside this machine and private networks too."
    )
    repack: bool = _model(
        bool, "--repack/--no-repack", " /-nr", default=True,
        help="Pack weights for the kernels of this CPU, or keep them as the file has them.  [default: repack]",
    )  # fmt: skip
    mmap: bool = _model(
        bool, "--mmap/--no-mmap", default=True,
        help="Map the file into memory, or read it into memory.  [default: mmap]",
    )  # fmt: skip
    mlock: bool = _model(
        bool, default=False, help="Lock the weights in memory, so that the system does not swap them out."
    )
    lora: str | None = _model(word, metavar="FILE", help="Add a LoRA adapter to the weights.")
    lora_scaled: tuple[str, float] | None = _model(
        read_scaled, metavar="FILE:SCALE", help="Add a LoRA adapter with this weight."
    )
    override_kv: tuple[tuple[str, bool | int | float | str], ...] = _model(
        read_override, default=(), many=True, metavar="KEY=TYPE:VALUE",
        help="Replace a field of the model's file. TYPE is int, float, bool or str.",
    )  # fmt: skip

    def settings(self) -> dict[str, Any]:
        """Return keywords of `Llama` for what was given, less the layers on the GPU."""
        return _given(
            use_extra_bufts=None if self.repack else False,
            use_mmap=None if self.mmap else False,
            use_mlock=self.mlock or None,
            n_threads=_threads(self.threads),
            n_threads_batch=_threads(self.threads),
            rpc=self.rpc,
            rpc_trust=None if self.rpc is None else self.rpc_trust,
            kv_overrides=dict(self.override_kv) or None,
            **self._adapter(),
        )

    def _adapter(self) -> dict[str, Any]:
        if self.lora_scaled is None:
            return {"lora_path": self.lora}
        if self.lora is not None:
            raise click.UsageError("--lora and --lora-scaled are two adapters, and one can be used: leave one out")
        path, scale = self.lora_scaled
        return {"lora_path": path, "lora_scale": scale}


@dataclass(frozen=True, kw_only=True)
class ModelOptions(WeightOptions, RopeOptions, ContextOptions):
    """How the weights are loaded, and the context that is made for them."""

    mmproj: Path | None = _model(
        Path, "-mm", metavar="FILE", exists=True,
        help="The model's projector, a second GGUF file: chats may have images or sound then (docs/images.md).",
    )  # fmt: skip

    def settings(self) -> dict[str, Any]:
        """Return keywords of `Llama` for what was given, less the layers on the GPU and RoPE, see `for_model`."""
        return WeightOptions.settings(self) | _given(
            n_ctx=self.ctx_size,
            flash_attn=self.flash_attn != "off",
            n_batch=self.batch_size,
            n_ubatch=self.ubatch_size,
            n_threads_batch=_threads(self.threads_batch),
            type_k=None if self.cache_type_k is None else KV_TYPES[self.cache_type_k],
            type_v=None if self.cache_type_v is None else KV_TYPES[self.cache_type_v],
            mmproj=self.mmproj,
        )


def _threads(asked: int | None) -> int | None:
    """Return a number of threads as llama.cpp reads it: all cores for 0 or less."""
    return system.cores() if asked is not None and asked < 1 else asked


def _given(**keywords: Any) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if value is not None}


weight_options = collected("loading", WeightOptions)
model_options = collected("loading", ModelOptions)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(Samplers):
    """The samplers, the length of an answer, and the seed."""

    max_tokens: int = _sampling(
        notation.limit, "-n", "--max-tokens", "--predict", "--n-predict", default=-1, metavar="N",
        help="Generate at most N tokens; -1: until the answer ends.",
    )  # fmt: skip
    seed: int = _sampling(
        int, least=-1, most=0xFFFFFFFF, default=-1, help="Seed of the random numbers; -1 is a random one."
    )


sampling_options = collected("sampling", SamplingOptions)


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """What is printed on stderr."""

    verbose: bool = _output(bool, "-v", default=False, help="llama.cpp's log, and tracebacks, on stderr.")
    quiet: bool = _output(bool, "-q", default=False, help="Nothing but errors on stderr.")
    log_file: Path | None = _output(Path, metavar="FILE", help="Append the log to FILE too.")


@dataclass(frozen=True, kw_only=True)
class OutputOptions(LogOptions):
    """What is printed, and where."""

    as_json: bool = _output(
        bool, "--json", default=False, variable="KVFLASH_AS_JSON",
        help="One JSON document on stdout: text, usage, timings and the pool's counters.",
    )  # fmt: skip
    stream: bool = _output(
        bool, "--stream/--no-stream", default=True, help="Print tokens as they come, or all at the end."
    )


log_options = collected("log", LogOptions)
output_options = collected("output", OutputOptions)


@dataclass(frozen=True, kw_only=True)
class SnapshotOptions:
    """Where a session comes from and goes to."""

    snapshot: Path | None = _snapshot(
        Path, metavar="FILE",
        help="Continue the session in FILE if it exists, and save the session to FILE at the end.",
    )  # fmt: skip
    snapshot_ro: bool = _snapshot(bool, default=False, help="Do not write the FILE of --snapshot, which must exist.")
    snapshot_compress: bool = _snapshot(
        bool, default=False, help="Compress with Zstandard; needs the package zstandard."
    )


snapshot_options = collected("saving", SnapshotOptions)


# --- the pool and its drafts


F = TypeVar("F", bound=Callable[..., Any])

_spec = in_section("Speculative decoding")

REMOVED = {
    "--draft": "--spec-draft-n-max",
    "--draft-n": "--spec-draft-n-max",
    "--draft-max": "--spec-draft-n-max",
}
"""Names that llama.cpp has had, and what took their place."""


@dataclass(frozen=True, kw_only=True)
class PoolOptions(PoolSettings):
    """What is asked of the pool. fields: of `KVFlashConfig`, by name."""

    report: Path | None = setting(
        Path, "--kvflash-report", metavar="FILE", section="KVFlash",
        help="Write an HTML page that shows which chunks were resident when.",
    )  # fmt: skip
    fields: dict[str, Any]

    def config(self) -> KVFlashConfig | None:
        """Return the pool's settings, or None when it is off."""
        asked = notation.pool(self.kvflash)
        if asked is None:
            return None
        spec = self.fields["spec"]
        drafts = None if spec is None else SpecConfig.read(spec)
        return KVFlashConfig(**asked, **self.fields | {"spec": drafts})

    def prefix_cache(self) -> PrefixCache | None:
        """Return where texts that were read are kept for later runs, or None."""
        if self.kvflash == "off" or self.cache is None:
            return None
        return PrefixCache(folder=self.cache, disk_bytes=self.cache_size)


pool_options = collected("pool", PoolOptions, also=KVFlashConfig)


@dataclass(frozen=True, kw_only=True)
class SpecOptions:
    """How drafts are made and verified, beside their types. fields: of `SpecConfig`, by name."""

    draft_n_max: int | None = _spec(
        notation.tokens, "--spec-draft-n-max", least=1,
        help="Draft at most N tokens a step.  [default: as measured costs decide, up to 31; 7 with recurrent state]",
    )  # fmt: skip
    fixed: bool = _spec(
        bool, "--spec-fixed", default=False,
        help="Verify --spec-draft-n-max tokens in each step, whatever it costs: the same call takes the same steps.",
    )  # fmt: skip
    fields: dict[str, Any]

    def over(self, config: SpecConfig | None) -> SpecConfig | None:
        """Combine the types of drafts with these options. A file without types is one of `auto`.

        ConfigError for options that would change nothing.
        """
        if self.fixed and self.draft_n_max is None:
            raise ConfigError("--spec-fixed verifies --spec-draft-n-max tokens: say how many")
        usual = SpecConfig()
        asked = {name: value for name, value in self.fields.items() if value != getattr(usual, name)}
        if config is None and "draft" not in asked:
            known = settings(SpecConfig)
            names = [known[name].long_flag(name) for name, value in asked.items() if value is not False]
            names += ["--spec-draft-n-max"] * (self.draft_n_max is not None)
            if names:
                raise ConfigError(f"{', '.join(names)}: nobody drafts: add --kvflash-spec auto, or -md and a file")
            return None
        if self.draft_n_max is not None:
            asked["width" if self.fixed else "max_width"] = self.draft_n_max + 1
        return replace(config or usual, **asked)


def _refuse_removed(ctx: click.Context, param: click.Parameter, value: object) -> None:
    if value is not None:
        given = next(name for name in param.opts if name in REMOVED)
        raise click.UsageError(f"{given} is called {REMOVED[given]} now")


def spec_options(function: F) -> F:
    """Add the options of drafts to a command, and pass them as `drafts`."""
    for name in REMOVED:
        function = option("Speculative decoding")(
            name, hidden=True, expose_value=False, allow_from_autoenv=False, callback=_refuse_removed
        )(function)
    return collected("drafts", SpecOptions, also=SpecConfig)(function)


# --- where the model goes: options with the names of upstream, and the list of devices


_device = in_section("Devices")

SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}


def read_shares(text: str) -> list[float]:
    """Read a share for each device, as 3,1. ValueError for any other text."""
    try:
        shares = [float(part) for part in text.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 <= share < math.inf for share in shares) or not any(shares):
        raise ValueError(f"{text!r} is not a share for each device, as 3,1")
    return shares


def read_margins(text: str) -> int | dict[str, int]:
    """Read MiB, for all devices or by name, and return bytes. ValueError for any other text."""
    parts = [part.rpartition("=") for part in text.split(",")]
    named = {name: size for name, _, size in parts if name}
    well = all(size.isdecimal() and bool(name) is bool(equal) for name, equal, size in parts)
    if not well or len(named) not in (0, len(parts)):
        raise ValueError(f"{text!r} is neither a number of MiB nor one for each device, as CUDA0=1024")
    if named:
        return {name: int(size) << 20 for name, size in named.items()}
    if len(parts) > 1:
        raise ValueError(f"{text!r} does not say which device is which: CUDA0={parts[0][2]},...")
    return int(parts[0][2]) << 20


def read_memory(text: str) -> dict[str, int]:
    """Read bytes by the names of devices, as CUDA0=24G,CPU=64G. ValueError for any other text."""
    parts = [part.partition("=") for part in text.split(",")]
    if not all(name for name, _, _ in parts) or len({name for name, _, _ in parts}) < len(parts):
        raise ValueError(f"{text!r} does not say which device has how much: CUDA0=24G, or CUDA0=24G,CPU=64G")
    return {name: notation.size(size) for name, _, size in parts}


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Which devices hold what."""

    device: str | None = _device(
        word, "-dev", metavar="NAME,...|none", help="Devices that hold layers, in their order.  [default: all GPUs]"
    )
    split_mode: str = _device(
        tuple(SPLIT_MODES), "-sm", metavar="|".join(SPLIT_MODES), default="layer",
        help="How the model is split over the devices; a pool needs whole layers.",
    )  # fmt: skip
    tensor_split: list[float] | None = _device(
        read_shares, "-ts", metavar="N,...",
        help="Share of the layers of each device, as 3,1.  [default: by free memory]",
    )  # fmt: skip
    main_gpu: int = _device(int, "-mg", least=0, default=0, help="The device for -sm none.")
    override_tensor: tuple[list[tuple[str, str]], ...] = _device(
        parse_overrides, "-ot", default=(), many=True, metavar="PATTERN=DEVICE,...",
        help="Put tensors whose name contains a match of the regular expression on DEVICE, which may be CPU.",
    )  # fmt: skip
    cpu_moe: bool = _device(bool, "-cmoe", default=False, help="Keep all experts in host memory.")
    n_cpu_moe: int = _device(
        int, "-ncmoe", least=0, default=0,
        help="Keep the experts of N layers in host memory: layers of the CPU, then the first layers of each device.",
    )  # fmt: skip
    fit: bool | None = _device(
        bool, "-fit/-no-fit", "--fit/--no-fit", metavar=ON_OFF,
        help="Before loading, choose what you left open so that it fits: layers, experts, pool, -ub, -ctk and -ctv."
        "  [default: with -ngl auto and a GPU, or --fit-target]",
    )  # fmt: skip
    fit_target: int | dict[str, int] | None = _device(
        read_margins, "-fitt", metavar="MiB|NAME=MiB,...",
        help="Memory that --fit leaves free on each device.  [default: 512, or 2 % of a GPU]",
    )  # fmt: skip
    device_memory: dict[str, int] | None = _device(
        read_memory, metavar="NAME=SIZE,...",
        help="Memory that --fit may use, as CUDA0=24G; --dry-run takes devices too that this machine lacks.",
    )  # fmt: skip

    @property
    def fits_layers(self) -> bool:
        """Whole layers are on a device, which is all that fitting knows."""
        return self.split_mode in ("none", "layer")

    def settings(self) -> dict[str, Any]:
        """Return the keywords of `Llama` that say so; none for what is left to llama.cpp."""
        overrides = [*chain(*self.override_tensor), *([(EXPERTS, HOST)] if self.cpu_moe else [])]
        return _given(
            device=self.device,
            split_mode=None if self.split_mode == "layer" else SPLIT_MODES[self.split_mode],
            tensor_split=self.tensor_split,
            main_gpu=self.main_gpu or None,
            override_tensor=overrides or None,
            n_cpu_moe=self.n_cpu_moe or None,
        )


def _list(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    check_first_run()
    library.load()
    from ..native.devices import devices

    click.echo("Available devices:")
    for device in devices():
        if device.kind != "other":
            sizes = f"{device.total_bytes >> 20:,} MiB, {device.free_bytes >> 20:,} MiB free"
            click.echo(f"  {device.name}: {device.description} ({sizes})")
    ctx.exit()


def device_options(function: F) -> F:
    """Add the options of devices and `--list-devices` to a command, and pass the former as `devices`."""
    listing = option("Devices")(
        "--list-devices",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_list,
        help="List the devices, and exit.",
    )
    return collected("devices", DeviceOptions)(listing(function))


# --- all that says how a model is opened


@dataclass(frozen=True, kw_only=True)
class OpeningOptions:
    """How a model is loaded, where it goes, its pool, and its drafts."""

    loading: ModelOptions
    devices: DeviceOptions
    pool: PoolOptions
    drafts: SpecOptions


def opening_options(function: F) -> F:
    """Add these options to a command, and pass them as `opening`."""

    @wraps(function)
    def call(*, loading: Any, devices: Any, pool: Any, drafts: Any, **others: Any) -> Any:
        opening = OpeningOptions(loading=loading, devices=devices, pool=pool, drafts=drafts)
        return function(opening=opening, **others)

    return model_options(device_options(pool_options(spec_options(call))))  # type: ignore[return-value]
