"""Writes a placement as a table for people, or as a document for programs."""

from __future__ import annotations

from typing import Any

from ..errors import mebibytes
from ..native.sizes import Needs
from .sizes import Device, Placement

COLUMNS = ("free", "weights", "KV", "state", "compute", "staging", "margin", "left")


def table(placement: Placement, devices: tuple[Device, ...]) -> str:
    """Write lines of text, sizes in MiB: a row by device, and what the rest of the numbers are."""
    rows = [_row(need, device) for need, device in zip(placement.needs, devices, strict=True)]
    labels = [f"{device.name} {device.description}".strip()[:28] for device in devices]
    width = max(len("device"), *map(len, labels))
    lines = [f"{'device':{width}}  {'  '.join(f'{name:>8}' for name in COLUMNS)}  MiB"]
    for label, (numbers, what) in zip(labels, rows, strict=True):
        lines.append(f"{label:{width}}  {'  '.join(f'{number:>8}' for number in numbers)}  {what}".rstrip())
    return "\n".join([*lines, summary(placement)])


def summary(placement: Placement) -> str:
    """Write one line: pool, KV type, step, and whether the pool is needed."""
    kv = placement.type_k if placement.type_k == placement.type_v else f"{placement.type_k}/{placement.type_v}"
    whole = placement.pool >= placement.n_ctx
    cache = (
        f"full cache of {placement.n_ctx:,} tokens"
        if whole
        else f"pool {placement.pool:,} of {placement.n_ctx:,} tokens"
    )
    text = f"{cache}, {kv}, ubatch {placement.n_ubatch:,}"
    return f"{text}; a full cache would fit too" if placement.redundant else text


def _row(need: Needs, device: Device) -> tuple[list[str], str]:
    """Write KV with queries and the index; compute with what something else takes; staging with exact reading's."""
    numbers = {
        "free": need.free,
        "weights": need.weights,
        "KV": need.kv + need.queries + need.index,
        "state": need.state,
        "compute": need.compute + need.extra,
        "staging": need.staging + need.stages + need.masses,
        "margin": need.margin,
        "left": need.left,
    }
    return [mebibytes(numbers[name]) for name in COLUMNS], _what(need, device)


def _what(need: Needs, device: Device) -> str:
    begin, end = need.layers
    layers = [f"layers {begin}-{end - 1}" if end - begin > 1 else f"layer {begin}"] if end > begin else []
    output = ["output"] if need.output else []
    experts = [f"experts of layers {spans(need.experts)}"] if need.experts else []
    embedding = ["token embedding"] if device.kind == "host" else []
    return " + ".join([*layers, *output, *experts, *embedding])


def spans(numbers: tuple[int, ...]) -> str:
    """Write numbers as 0-3, 7, 9-10."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{begin}-{end}" if end > begin else f"{begin}" for begin, end in found)


def options(placement: Placement) -> list[str]:
    """Write a placement as options of llama.cpp's command line, as far as it has them."""
    words = ["-c", str(placement.n_ctx), "-ngl", str(placement.n_gpu_layers)]
    if placement.tensor_split is not None:
        words += ["-ts", ",".join(f"{share:g}" for share in placement.tensor_split)]
    if placement.overrides:
        words += ["-ot", ",".join(f"{pattern}={device}" for pattern, device in placement.overrides)]
    words += ["-ub", str(placement.n_ubatch), "-b", str(max(placement.n_ubatch, 2048))]
    words += ["-ctk", placement.type_k, "-ctv", placement.type_v, "-fa", "on"]
    return words + ([] if placement.use_mmap else ["--no-mmap"])


def document(placement: Placement, devices: tuple[Device, ...]) -> dict[str, Any]:
    """Describe a placement for JSON; sizes in bytes."""
    return {
        "n_ctx": placement.n_ctx,
        "pool": placement.pool,
        "n_ubatch": placement.n_ubatch,
        "type_k": placement.type_k,
        "type_v": placement.type_v,
        "n_gpu_layers": placement.n_gpu_layers,
        "tensor_split": placement.tensor_split,
        "override_tensor": [list(override) for override in placement.overrides],
        "use_mmap": placement.use_mmap,
        "level": placement.level,
        "pipeline": placement.pipeline,
        "redundant": placement.redundant,
        "why": placement.why,
        "options": options(placement),
        "devices": [
            {
                "name": device.name,
                "description": device.description,
                "kind": device.kind,
                "free": need.free,
                "total": device.total,
                "needs": need.itemised,
                "left": need.left,
                "layers": list(range(*need.layers)),
                "output": need.output,
                "experts": list(need.experts),
            }
            for need, device in zip(placement.needs, devices, strict=True)
        ],
    }
