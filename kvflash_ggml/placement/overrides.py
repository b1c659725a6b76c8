"""Patterns of tensors' names that keep experts on another device than their layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Override = tuple[str, str]
"""(regular expression, device): the first that is found in a tensor's name counts."""

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""What upstream's --cpu-moe finds the tensors of experts by."""


def experts(layers: Iterable[int], device: str) -> tuple[Override, ...]:
    """The override that puts the experts of these layers on a device; none for no layers."""
    numbers = "|".join(_ranges(sorted(set(layers))))
    return ((rf"^blk\.({numbers}){EXPERTS}", device),) if numbers else ()


def _ranges(layers: list[int]) -> Iterator[str]:
    """Alternatives that match these numbers. Whole tens are one each: 8, 9, 1[0-9], 2[0-3]."""
    tens: dict[int, list[int]] = {}
    for layer in layers:
        tens.setdefault(layer // 10, []).append(layer % 10)
    for ten, digits in tens.items():
        prefix = str(ten) if ten else ""
        if digits == list(range(digits[0], digits[-1] + 1)) and len(digits) > 1:
            yield f"{prefix}[{digits[0]}-{digits[-1]}]"
        else:
            yield from (f"{prefix}{digit}" for digit in digits)
