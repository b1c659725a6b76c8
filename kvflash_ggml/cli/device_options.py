"""Where the model goes: the options of upstream's names, and the list of what there is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import click

from ..errors import ConfigError
from ..llama.devices import parse_overrides
from ..native import library
from ..placement.overrides import EXPERTS
from ..placement.sizes import HOST
from .first_run import check_first_run
from .sections import collected, option

_device = option("Devices")

SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Which devices hold what."""

    device: str | None
    split_mode: str
    tensor_split: list[float] | None
    main_gpu: int
    override_tensor: list[tuple[str, str]]
    cpu_moe: bool
    n_cpu_moe: int
    fit: bool | None
    fit_target: int | dict[str, int] | None

    @property
    def fits_layers(self) -> bool:
        """Whole layers are on a device, which is all that fitting knows."""
        return self.split_mode in ("none", "layer")

    def settings(self) -> dict[str, Any]:
        """The keywords of `Llama` that say so; none for what is left to llama.cpp."""
        overrides = [*self.override_tensor, *([(EXPERTS, HOST)] if self.cpu_moe else [])]
        given = {
            "device": self.device,
            "split_mode": None if self.split_mode == "layer" else SPLIT_MODES[self.split_mode],
            "tensor_split": self.tensor_split,
            "main_gpu": self.main_gpu or None,
            "override_tensor": overrides or None,
            "n_cpu_moe": self.n_cpu_moe or None,
        }
        return {name: value for name, value in given.items() if value is not None}


def _shares(_ctx: click.Context, _param: click.Parameter, value: str | None) -> list[float] | None:
    if value is None:
        return None
    try:
        shares = [float(part) for part in value.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 <= share < math.inf for share in shares) or not any(shares):
        raise click.BadParameter(f"{value!r} is not a share for each device, as 3,1")
    return shares


def _margins(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | dict[str, int] | None:
    if value is None:
        return None
    parts = [part.rpartition("=") for part in value.split(",")]
    named = {name: size for name, _, size in parts if name}
    well = all(size.isdecimal() and bool(name) is bool(equal) for name, equal, size in parts)
    if not well or len(named) not in (0, len(parts)):
        raise click.BadParameter(f"{value!r} is neither a number of MiB nor one for each device, as CUDA0=1024")
    if named:
        return {name: int(size) << 20 for name, size in named.items()}
    if len(parts) > 1:
        raise click.BadParameter(f"{value!r} does not say which device is which: CUDA0={parts[0][2]},...")
    return int(parts[0][2]) << 20


def _overrides(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> list[tuple[str, str]]:
    try:
        return [pair for value in values for pair in parse_overrides(value)]
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


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


device_options = collected(
    "devices",
    DeviceOptions,
    _device(
        "-dev",
        "--device",
        metavar="NAME,...|none",
        help="Devices that hold layers, in their order.  [default: all GPUs]",
    ),
    _device(
        "-sm",
        "--split-mode",
        type=click.Choice(list(SPLIT_MODES)),
        metavar="|".join(SPLIT_MODES),
        default="layer",
        show_default=True,
        help="How the model is split over them; a pool needs whole layers.",
    ),
    _device(
        "-ts",
        "--tensor-split",
        metavar="N,...",
        callback=_shares,
        help="Share of the layers of each device, as 3,1.  [default: by free memory]",
    ),
    _device(
        "-mg",
        "--main-gpu",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="The device that is used with -sm none.  [default: 0]",
    ),
    _device(
        "-ot",
        "--override-tensor",
        multiple=True,
        metavar="PATTERN=DEVICE,...",
        callback=_overrides,
        help="Tensors whose name has this regular expression in it go to that device, or the CPU.",
    ),
    _device("-cmoe", "--cpu-moe", is_flag=True, help="All experts in host memory."),
    _device(
        "-ncmoe",
        "--n-cpu-moe",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="The experts of N layers in host memory: layers of the CPU, then the first of each device.  [default: 0]",
    ),
    _device(
        "-fit/-no-fit",
        "--fit/--no-fit",
        default=None,
        help="Before loading, find what fits of what is not given: layers, experts, pool, -ub, -ctk and -ctv."
        "  [default: with -ngl auto and a GPU, or --fit-target]",
    ),
    _device(
        "-fitt",
        "--fit-target",
        metavar="MiB|NAME=MiB,...",
        callback=_margins,
        help="Memory that it leaves free of each device.  [default: 512, or 2 % of a GPU]",
    ),
    _device(
        "--list-devices",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_list,
        help="List the devices, and exit.",
    ),
)
