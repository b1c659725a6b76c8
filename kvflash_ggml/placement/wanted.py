"""Reads from keywords where a user wants a model: which devices hold its layers, and which tensors lie elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..config import KVFlashConfig
from ..errors import ConfigError, UnsupportedModelError
from .sizes import HOST

Override = tuple[str, str]
"""(regular expression, device): the first that is found in a tensor's name counts."""

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""What upstream's --cpu-moe finds the tensors of experts by."""

NONE, LAYER, TENSOR = 0, 1, 3
"""llama.cpp's values of `split_mode`."""

MAX_DEVICES = 15
"""That llama.cpp computes with at once, beside the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    """device: names, in the order of the layers; empty for none, None for llama.cpp's choice. override_tensor: (regular
    expression, device), the first that is found in a tensor's name counts. n_cpu_moe: so many layers have their experts
    in host memory: those that are there as a whole, then the first of each device, in turn.
    """

    device: tuple[str, ...] | None = None
    override_tensor: tuple[Override, ...] = ()
    n_cpu_moe: int = 0

    def keywords(self) -> dict[str, Any]:
        """Return the keywords that the constructor was asked with."""
        return {"device": self.device, "override_tensor": self.override_tensor, "n_cpu_moe": self.n_cpu_moe}


def read(upstream: dict[str, Any], config: KVFlashConfig | None) -> DeviceChoice:
    """Take what is asked for out of the keywords. ConfigError, or UnsupportedModelError for what a pool cannot do."""
    if config is not None and upstream.get("split_mode") == TENSOR:
        raise UnsupportedModelError(
            "split_mode=3 (tensor) keeps a part of each head's cache on every device, which a pool cannot page: use"
            " split_mode=1 (layer), or kvflash=None"
        )
    check_shares(upstream.get("tensor_split") or ())
    device, overrides = upstream.pop("device", None), upstream.pop("override_tensor", None) or ()
    if isinstance(device, str):
        device = () if device == "none" else tuple(device.split(","))
    if isinstance(overrides, str):
        overrides = parse_overrides(overrides)
    try:
        pairs = tuple((str(pattern), str(where)) for pattern, where in overrides)
    except (TypeError, ValueError) as err:
        raise ConfigError(f"override_tensor={overrides!r}: pairs of a regular expression and a device") from err
    layers = upstream.pop("n_cpu_moe", None) or 0
    if layers < 0:
        raise ConfigError(f"n_cpu_moe={layers}: a number of layers, 0 or more")
    return DeviceChoice(
        device=None if device is None else tuple(device),
        override_tensor=pairs,
        n_cpu_moe=layers,
    )


def parse_overrides(text: str) -> tuple[Override, ...]:
    """Read `PATTERN=DEVICE,...`, as upstream writes it. ConfigError for any other text."""
    out = []
    for part in text.split(","):
        pattern, found, where = part.rpartition("=")
        if not found or not pattern or not where:
            raise ConfigError(f"override_tensor: {part!r} is not PATTERN=DEVICE, as '{EXPERTS}={HOST}'")
        out.append((pattern, where))
    return tuple(out)


def check_shares(shares: Sequence[float]) -> None:
    """Raise ConfigError unless layers can be shared out so."""
    if len(shares) > MAX_DEVICES + 1 or not all(0 <= share < math.inf for share in shares):
        raise ConfigError(f"tensor_split={[*shares]}: a share for each device, {MAX_DEVICES + 1} at most, 0 or more")
