"""Where the model goes: the options of upstream's names, and the list of what there is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import click

from ..native import library
from ..notation import word
from ..placement.devices import EXPERTS, parse_overrides
from ..placement.sizes import HOST
from ..settings import in_section
from .child import check_first_run
from .sections import collected, option

F = TypeVar("F", bound=Callable[..., Any])

_device = in_section("Devices")

SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}


def read_shares(text: str) -> list[float]:
    """A share for each device, as 3,1. ValueError for any other text."""
    try:
        shares = [float(part) for part in text.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 <= share < math.inf for share in shares) or not any(shares):
        raise ValueError(f"{text!r} is not a share for each device, as 3,1")
    return shares


def read_margins(text: str) -> int | dict[str, int]:
    """MiB, for all devices or by name, as bytes. ValueError for any other text."""
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


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Which devices hold what."""

    device: str | None = _device(
        word, "-dev", metavar="NAME,...|none", help="Devices that hold layers, in their order.  [default: all GPUs]"
    )
    split_mode: str = _device(
        tuple(SPLIT_MODES), "-sm", metavar="|".join(SPLIT_MODES), default="layer",
        help="How the model is split over them; a pool needs whole layers.",
    )  # fmt: skip
    tensor_split: list[float] | None = _device(
        read_shares, "-ts", metavar="N,...",
        help="Share of the layers of each device, as 3,1.  [default: by free memory]",
    )  # fmt: skip
    main_gpu: int = _device(int, "-mg", least=0, default=0, help="The device that is used with -sm none.")
    override_tensor: tuple[list[tuple[str, str]], ...] = _device(
        parse_overrides, "-ot", default=(), many=True, metavar="PATTERN=DEVICE,...",
        help="Tensors whose name has this regular expression in it go to that device, or the CPU.",
    )  # fmt: skip
    cpu_moe: bool = _device(bool, "-cmoe", default=False, help="All experts in host memory.")
    n_cpu_moe: int = _device(
        int, "-ncmoe", least=0, default=0,
        help="The experts of N layers in host memory: layers of the CPU, then the first of each device.",
    )  # fmt: skip
    fit: bool | None = _device(
        bool, "-fit/-no-fit", "--fit/--no-fit",
        help="Before loading, find what fits of what is not given: layers, experts, pool, -ub, -ctk and -ctv."
        "  [default: with -ngl auto and a GPU, or --fit-target]",
    )  # fmt: skip
    fit_target: int | dict[str, int] | None = _device(
        read_margins, "-fitt", metavar="MiB|NAME=MiB,...",
        help="Memory that it leaves free of each device.  [default: 512, or 2 % of a GPU]",
    )  # fmt: skip

    @property
    def fits_layers(self) -> bool:
        """Whole layers are on a device, which is all that fitting knows."""
        return self.split_mode in ("none", "layer")

    def settings(self) -> dict[str, Any]:
        """The keywords of `Llama` that say so; none for what is left to llama.cpp."""
        overrides = [*chain(*self.override_tensor), *([(EXPERTS, HOST)] if self.cpu_moe else [])]
        given = {
            "device": self.device,
            "split_mode": None if self.split_mode == "layer" else SPLIT_MODES[self.split_mode],
            "tensor_split": self.tensor_split,
            "main_gpu": self.main_gpu or None,
            "override_tensor": overrides or None,
            "n_cpu_moe": self.n_cpu_moe or None,
        }
        return {name: value for name, value in given.items() if value is not None}


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
    """A decorator that adds the options of devices and `--list-devices`, and passes the former as `devices`."""
    listing = option("Devices")(
        "--list-devices",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_list,
        help="List the devices, and exit.",
    )
    return collected("devices", DeviceOptions)(listing(function))
