"""Where the rows of a tree lie, and where those of its path go, as positions counted from the root's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..arrays import Int32s


@dataclass(frozen=True, slots=True, eq=False)
class Branches:
    """The rows of a tree in the order of depth; row 0 is the root.

    depth: [n], positions after the root's. parent: [n], the row before each, -1 for the root. where: [n], positions
    after the root's whose slots they take.
    """

    depth: Int32s
    parent: Int32s
    where: Int32s

    @property
    def room(self) -> int:
        """Positions from the root's on whose slots are needed."""
        return int(self.where.max()) + 1


def places(depth: Int32s, main: npt.NDArray[np.bool_]) -> Int32s:
    """The position whose slot each row takes, [n].

    depth: [n], positions after the root's. main: [n], is the row on the chain that is expected to stay? These lie where
    they would stay. The others lie beyond the deepest row, where no path goes.
    """
    where: Int32s = depth.copy()
    where[~main] = depth.max() + 1 + np.arange(np.count_nonzero(~main))
    return where


def leaving(path: Sequence[int], where: Int32s) -> list[int]:
    """The places of the rows off a path, which are forgotten. path: row numbers from the root on."""
    off = set(range(len(where))) - set(path)
    return [int(where[row]) for row in sorted(off)]


def moving(path: Sequence[int], where: Int32s) -> tuple[list[int], list[int]]:
    """The places that rows of a path leave, and those that they go to: the positions after the root, in order."""
    pairs = [(at, to) for to, at in enumerate(where[list(path)].tolist()) if at != to]
    return [at for at, _ in pairs], [to for _, to in pairs]
