"""The interface of drafters, the facts that they get of their target, and the simplest drafter: a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..arrays import Floats, Int32s
from ..errors import DraftError
from ..state.session import SavedDraft
from .draft import Draft, chain

if TYPE_CHECKING:
    from ..native.engine import PagedEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The facts of the target that a drafter needs.

    path: the model's file, the first one if it is split. model, context: addresses of the llama_model and the
    llama_context; both outlive the drafter. n_embd, n_vocab: values of a layer's input, and tokens. n_ctx: longest
    text. ends: tokens that end a text. threads, batch_threads: for one token, and for several. offload: use a device.
    repack: pack weights for the CPU's kernels.
    """

    path: Path
    model: int
    context: int
    n_embd: int
    n_vocab: int
    n_ctx: int
    ends: frozenset[int] = frozenset()
    threads: int = 1
    batch_threads: int = 1
    offload: bool = False
    repack: bool = True


@dataclass(frozen=True, slots=True)
class Features:
    """The rows of the target's compute that a drafter gets for each token, beside the token.

    layers: the inputs of these layers, one after the other. nextn: the state after the last layer, before the head, for
    the target's own heads for further tokens. newest: how many of the newest tokens matter; None for all.
    """

    layers: tuple[int, ...] = ()
    nextn: bool = False
    newest: int | None = None

    def __bool__(self) -> bool:
        return bool(self.layers) or self.nextn


class Drafter(Protocol):
    """Proposes tokens that may follow a text. It is asked between steps, on the thread that computes.

    name: for people. wants: the rows that `observe` gets beside tokens; fixed before anything is observed.
    """

    name: str
    wants: Features

    def observe(self, start: int, tokens: Int32s, rows: Floats | None) -> None:
        """Take tokens of the text from position `start` on: each once, in order.

        Known tokens from position `start` on become void. There may be a gap before `start` where a restored text was
        not evaluated. rows: the wanted rows of each token, [len(tokens), width]; None if the drafter wants none, or
        they were not computed here.
        """
        ...

    def propose(self, root: int, max_tokens: int) -> Draft | None:
        """Return at most `max_tokens` that may follow the observed text and then `root`, None for nothing."""
        ...

    def truncate(self, length: int) -> None:
        """Forget the text from `length` tokens on. The drafter may forget more."""
        ...

    def close(self) -> None:
        """Free everything. It may be called again."""
        ...


@runtime_checkable
class Sometimes(Protocol):
    """A drafter that knows without being asked whether it can propose anything now."""

    @property
    def able(self) -> bool: ...


@runtime_checkable
class Remembering(Protocol):
    """A drafter whose knowledge of a text can be saved, so that it need not read the text again."""

    def state(self) -> SavedDraft | None:
        """Read the observed text to its end and return the drafter's state; None for nothing.

        SnapshotError if it cannot be saved.
        """
        ...

    def load(self, saved: SavedDraft) -> None:
        """Take over the state of a drafter of the same origin, after the text was cut to nothing.

        SnapshotError, and nothing known, if the state is of another origin, or damaged.
        """
        ...


# --- rows of the target's compute: kept once, and handed to each drafter in its order


class FeatureRows:
    """Lets an engine keep the rows that drafters want of each token. Make it once, before the engine's first step.

    n_embd: values of a layer's input. newest: how many of the newest tokens any drafter uses; None for all.
    UnsupportedError for an architecture that does not give these rows.
    """

    def __init__(self, engine: PagedEngine, drafters: Sequence[Drafter], n_embd: int) -> None:
        self._layers = sorted({layer for drafter in drafters for layer in drafter.wants.layers})
        self._n_embd = n_embd
        self._engine = engine
        spans = [drafter.wants.newest for drafter in drafters]
        self.newest = None if None in spans else max(span for span in spans if span is not None)
        self._columns: dict[Features, slice | npt.NDArray[np.intp]] = {}
        self._width = engine.open_features(self._layers, nextn=any(drafter.wants.nextn for drafter in drafters))

    def read(self, count: int) -> Floats:
        """Return the rows of the first `count` tokens of the newest step, [count, width]. Waits for the compute."""
        rows = np.empty((count, self._width), np.float32)
        self._engine.read_features(0, rows)
        return rows

    def of(self, wants: Features, rows: Floats) -> Floats:
        """Return the columns that one drafter wants, in its order."""
        columns = self._columns.get(wants)
        if columns is None:
            columns = self._columns[wants] = self._find(wants)
        return rows[:, columns]

    def _find(self, wants: Features) -> slice | npt.NDArray[np.intp]:
        n = self._n_embd
        parts = [np.arange(n) + n * self._layers.index(layer) for layer in wants.layers]
        if wants.nextn:
            parts.append(np.arange(n * len(self._layers), self._width))
        columns = np.concatenate(parts)
        adjacent = bool(np.all(np.diff(columns) == 1))  # a view is enough
        return slice(int(columns[0]), int(columns[-1]) + 1) if adjacent else columns


# --- a drafter as llama-cpp-python has them


class Callback:
    """Asks a `LlamaDraftModel`, or any function from the text's tokens to tokens."""

    name = "draft_model"
    wants = Features()

    def __init__(self, model: Callable[[Int32s], Any]) -> None:
        self._model = model
        self._text = np.empty(0, np.int32)
        self._length = 0

    def observe(self, start: int, tokens: Int32s, rows: Floats | None) -> None:
        end = start + len(tokens)
        if end >= len(self._text):
            self._text = np.resize(self._text, 2 * end + 1) if end else self._text
        self._text[start:end] = tokens
        self._length = end

    def propose(self, root: int, max_tokens: int) -> Draft | None:
        """DraftError if the function returns anything but token ids."""
        text = np.append(self._text[: self._length], np.int32(root)).astype(np.intc)
        proposed = np.asarray(self._model(text))
        if proposed.size == 0:
            return None
        with np.errstate(invalid="ignore"):  # a cast NaN differs from its source, and is refused below
            whole = proposed.astype(np.int32) if proposed.dtype.kind in "iuf" and proposed.ndim == 1 else None
        if whole is None or not np.array_equal(whole, proposed):
            raise DraftError(f"{self.name}: tokens must be a list of whole numbers, not {proposed!r}")
        return chain(whole[:max_tokens], self.name)

    def truncate(self, length: int) -> None:
        self._length = min(self._length, length)

    def close(self) -> None:
        """See `Drafter`."""
