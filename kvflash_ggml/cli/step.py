"""`kvflash-run doctor --measure`: what devices lose to a whole step, and how much of it nobody has counted.

A backend grows buffers of its own at its first large product, which no measure before a load can tell: they are what
margins are for.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedModelError, mebibytes
from .child import run_child

if TYPE_CHECKING:
    from ..native.measure import Need
    from ..placement.sizes import Device

_MODULE = "kvflash_ggml.cli.step"


def measured(model: str | None, *, timeout: float) -> tuple[str, list[dict[str, Any]], str]:
    """A line for people, a document by device (bytes), and why it failed, empty if it has not. In a child process."""
    child = run_child(model, timeout=timeout, module=_MODULE)
    found = child.said.get("step")
    if child.failure or found is None:
        return "", [], child.failure or "the child said nothing"
    devices = found["devices"]
    if not devices:
        return "no device but the host, whose memory others use too: there is nothing to tell", [], ""
    return "\n".join(_line(device, found["n_ubatch"]) for device in devices), devices, ""


def _line(device: Mapping[str, Any], n_ubatch: int) -> str:
    taken, beyond, margin = (mebibytes(device[name]) for name in ("taken", "beyond", "margin"))
    return (
        f"{device['name']}: {taken} MiB with a step of {n_ubatch:,} tokens, {beyond} of them beyond what is counted; "
        f"the margin is {margin}"
    )


def main(model: str) -> None:
    """In the child process."""
    from ..native import library

    library.load()
    settings: dict[str, Any] = {"n_ctx": 0, "verbose": False}
    settings |= {"fit": True} if library.supports_gpu_offload() else {"n_gpu_layers": 0}
    sys.stdout.write(json.dumps({"step": take(model, settings)}) + "\n")


def take(model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Load a model, take its largest step and one of a token. What each device has lost to it, in bytes."""
    from kvflash_ggml import KVFlashConfig, Llama

    from ..native import measure
    from ..placement import memory

    def address(pointer: Any) -> int:
        return ctypes.cast(pointer, ctypes.c_void_p).value or 0

    before = memory.devices()
    try:
        llm = Llama(model, kvflash=KVFlashConfig(reading="pool", calibrate=False), **settings)
    except UnsupportedModelError:
        llm = Llama(model, flash_attn=True, **settings)
    with closing(llm):
        n_ubatch = llm.context_params.n_ubatch
        llm.eval([token % llm.n_vocab() for token in range(n_ubatch)])
        llm.eval([0])
        counted = measure.taken(address(llm._ctx.ctx), address(llm._model.model))
        staging = {} if llm._session is None else {x.name: x.staging_bytes for x in llm._session.engine.info.devices}
        return {"n_ubatch": n_ubatch, "devices": lost(before, memory.devices(), counted, staging)}


def lost(
    before: Sequence[Device], after: Sequence[Device], counted: Sequence[Need], staging: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Of each device but the host that something of ours is on. staging: bytes by name, which no `Need` has."""
    from ..placement import memory
    from ..placement.sizes import Fit

    left = {device.name: device.free for device in after}
    ours = {x.device: x.model + x.context + x.compute + x.queries + staging.get(x.device, 0) for x in counted}
    return [
        {
            "name": device.name,
            "taken": device.free - left[device.name],
            "beyond": device.free - left[device.name] - ours[device.name],
            "margin": memory.margin(device, Fit()),
        }
        for device in before
        if device.kind != "host" and ours.get(device.name)
    ]
