"""The exceptions that users meet. Each names the value, the limit and the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CLOSED = "this model is closed: make a new Llama"
"""The message of the KVFlashError that every call raises after `close`."""


class KVFlashError(Exception):
    """Base of every error this package raises on purpose."""


class LibraryError(KVFlashError, ImportError):
    """The native library or llama_cpp is missing, foreign, or of the wrong version."""


class ConfigError(KVFlashError, ValueError):
    """A setting has a value that cannot work."""


class NotMade(ConfigError):
    """llama.cpp makes no model of a file, or no context with these settings; it says why."""


class DeviceLimit(ConfigError):
    """A setting needs a larger tensor than a device computes on. device: its name. needed, limit: bytes."""

    def __init__(self, device: str, what: str, *, needed: int, limit: int, remedy: str) -> None:
        text = (
            f"{what} takes {mebibytes(needed)} MiB, and {device} computes on tensors of {mebibytes(limit)} MiB at most"
        )
        super().__init__(f"{text}: {remedy}")
        self.device = device
        self.needed = needed
        self.limit = limit


class UnsupportedModelError(KVFlashError, ValueError):
    """The model's architecture or memory type cannot run in a pool."""


class EncoderError(UnsupportedModelError):
    """The model embeds texts and writes none, so there is no cache to bound."""


class PoolExhausted(KVFlashError, RuntimeError):
    """Every block of the pool is protected, so nothing can be evicted."""


class ContextFull(KVFlashError, ValueError):
    """The tokens do not fit in the logical context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change that makes a placement fit, or helps. option: as the command line takes it. frees: bytes there.

    cost: what is lost by it. enough: it fits then. changes: fields of PlacementRequest, with their new
    values.
    """

    option: str
    frees: int
    cost: str
    enough: bool
    changes: Mapping[str, Any]


class DoesNotFit(KVFlashError, MemoryError):
    """What is asked for has no room on a device.

    device: its name. needed, free: bytes. needs: what needs how much of it, by name. remedies: those that are enough by
    themselves, and then those that help, the best first. why: a sentence, where the numbers do not tell.
    """

    def __init__(
        self,
        device: str,
        *,
        needed: int,
        free: int,
        needs: Mapping[str, int],
        remedies: Sequence[Remedy] = (),
        why: str = "",
    ) -> None:
        parts = ", ".join(f"{name} {mebibytes(size)}" for name, size in needs.items() if size)
        text = f"{device} has {mebibytes(free)} MiB free, this needs {mebibytes(needed)}: {parts}."
        text += f" {why}" if why else ""
        for begin, enough in (("Enough by itself", True), ("Helps", False)):
            some = [f"{x.option} (frees {mebibytes(x.frees)}: {x.cost})" for x in remedies if x.enough is enough]
            text += f" {begin}: {', '.join(some)}." if some else ""
        text += "" if remedies else " Take a smaller model, or one of fewer bits."
        super().__init__(text)
        self.device = device
        self.needed = needed
        self.free = free
        self.needs = dict(needs)
        self.remedies = tuple(remedies)


class HostMemoryError(KVFlashError, MemoryError):
    """The paged-out chunks would pass the ceiling on host memory, or host memory could not be had."""


class DecodeError(KVFlashError, RuntimeError):
    """llama.cpp could not evaluate a batch. The session still holds everything before it."""


class NotFinite(DecodeError, ArithmeticError):
    """A model has computed what is no number, so that nothing that follows would be one. `reset()` forgets the text."""


class RemoteError(KVFlashError, ConnectionError):
    """A server of devices cannot be used: nobody answers, it is busy, or it speaks another protocol."""


class DeviceLost(KVFlashError, RuntimeError):
    """A server whose devices compute for a model does not answer any more. The model can only be saved and closed.

    device: its endpoint. kept: how many leading tokens of the text can be had back, with
    `save_snapshot(path, salvage=True)`.
    """

    def __init__(self, device: str, kept: int = 0) -> None:
        super().__init__(device, kept)
        self.device = device
        self.kept = kept

    def __str__(self) -> str:
        kept = f"the first {self.kept} tokens of the text are" if self.kept else "nothing of the text is"
        way = ": save_snapshot(path, salvage=True) writes them, and other devices go on from there" if self.kept else ""
        return f"the server {self.device} does not answer any more; {kept} on this machine{way}"


class EngineError(KVFlashError, RuntimeError):
    """The native engine refused a call whose values cannot be right. Nothing has changed."""


class UnsupportedError(EngineError, NotImplementedError):
    """The native engine was asked for what it cannot do for this model, or not yet. Nothing has changed."""


class CalibrationError(KVFlashError, RuntimeError):
    """The retrieval heads of a model cannot be found here. All heads count then."""


class HubError(KVFlashError, RuntimeError):
    """A model cannot be had from a hub, and is not in its cache folder."""


class DraftError(KVFlashError, ValueError):
    """A drafter has proposed what cannot be verified. The text goes on without it."""


class ConversionError(KVFlashError, ValueError):
    """A checkpoint or a model's file that cannot be converted or used. where: its name; what: what is wrong in it."""

    def __init__(self, where: str, what: str, *, found: object, wanted: str, remedy: str) -> None:
        super().__init__(f"{brief(where)}: {brief(what)} is {brief(found)}; wanted: {wanted}. {remedy}")
        self.what = what
        self.found = found
        self.wanted = wanted
        self.remedy = remedy


class SnapshotError(KVFlashError, ValueError):
    """A snapshot or saved state cannot be written, read or used."""


class SnapshotMismatch(SnapshotError):
    """A sound snapshot of another model, or made with other settings. field, found, expected: what differs."""

    def __init__(self, name: str, field: str, found: object, expected: object) -> None:
        super().__init__(f"{name} was saved with {field} = {brief(found)}, this model has {brief(expected)}")
        self.field = field
        self.found = found
        self.expected = expected


def brief(value: object) -> str:
    """Write a value from a stranger's file so that it is fit for a terminal."""
    text = str(value)
    return repr(text[:100])[1:-1] + "..." * (len(text) > 100)


def mebibytes(size: int) -> str:
    """Write a number of bytes in MiB."""
    return f"{size / 2**20:,.0f}"
