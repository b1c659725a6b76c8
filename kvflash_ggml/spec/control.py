"""What decides about drafts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from .draft import Draft


class Controls(Protocol):
    """What decides about drafts. A step asks, proposes, chooses and tells, in this order.

    speedup: times plain decoding since `begin`, None before it is known. excess: seconds that drafts have cost beyond
    what they won since `begin`, below 0 if they won. off: why the last step was plain, None if it was not.
    """

    @property
    def speedup(self) -> float | None: ...
    @property
    def excess(self) -> float: ...
    @property
    def off(self) -> str | None: ...

    def begin(self, length: int) -> None:
        """An answer begins, after a text of so many tokens."""
        ...

    def apart(self) -> None:
        """Steps of another kind came between the last step and what follows."""
        ...

    def ask(self, source: str, behind: int = 0, instead: Collection[str] = ()) -> int:
        """How many tokens this source should be asked for now; 0 for none. behind: it has so many to read before.

        instead: sources that can be asked if this one is not; 0 if one of them promises more.
        """
        ...

    def proposed(self, source: str, draft: Draft | None, seconds: float) -> None:
        """What it proposed, None or empty for nothing, and how long that took."""
        ...

    def choose(self, draft: Draft, instead: Collection[str] = ()) -> int:
        """Rows to verify, the root included: the first rows - 1 nodes, padded if there are fewer. 1 for a plain step.

        instead: sources that could be asked as well; 1 if one of them promises more.
        """
        ...

    def told(
        self, rows: int, seconds: float, draft: Draft | None = None, path: Sequence[int] = (), *, stopped: bool = False
    ) -> None:
        """A step of so many rows took so long, proposals not included, and accepted the nodes of `path`.

        draft: what was verified, without padding. stopped: the text ended there, so what follows was not tested.
        """
        ...

    def idle(self, sources: Collection[str]) -> int:
        """For so many steps from now on none of these is worth asking, so that these steps need not be told."""
        ...

    def passed(self, steps: int) -> float:
        """So many plain steps were neither timed nor told. How long they took, as far as is known."""
        ...


class Fixed:
    """Always the same rows, whatever they take: what is verified depends on the tokens alone."""

    speedup = None
    excess = 0.0
    off = None

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def begin(self, length: int) -> None:
        """See `Controls`."""

    def apart(self) -> None:
        """See `Controls`."""

    def ask(self, source: str, behind: int = 0, instead: Collection[str] = ()) -> int:
        """See `Controls`."""
        return self._rows - 1

    def proposed(self, source: str, draft: Draft | None, seconds: float) -> None:
        """See `Controls`."""

    def choose(self, draft: Draft, instead: Collection[str] = ()) -> int:
        """See `Controls`."""
        return self._rows if len(draft) else 1

    def told(
        self, rows: int, seconds: float, draft: Draft | None = None, path: Sequence[int] = (), *, stopped: bool = False
    ) -> None:
        """See `Controls`."""

    def idle(self, sources: Collection[str]) -> int:
        """See `Controls`."""
        return 0

    def passed(self, steps: int) -> float:
        """See `Controls`."""
        return 0.0
