"""How much of a text is on this machine if its devices are lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..constants import CHUNK
from ..errors import DeviceLost
from ..host.store import HostStore
from ..pool.page_table import PageTable
from .checkpoints import Checkpoints

if TYPE_CHECKING:
    from ..native.engine import Engine


@dataclass(frozen=True, slots=True)
class Recovery:
    """Tells how much of a text can be recovered. It asks no device for anything."""

    engine: Engine
    table: PageTable
    store: HostStore
    checkpoints: Checkpoints

    @property
    def kept(self) -> int:
        """Leading tokens that can be recovered: those of sealed chunks whose images were read while all servers
        answered.

        For recurrent state and windows, the tokens before the newest checkpoint among them.
        """
        sealed = self.table.length // CHUNK
        length = next((c for c in range(sealed) if not self._is_sound(c)), sealed) * CHUNK
        info = self.engine.info
        return self.checkpoints.nearest(length) if info.recurrent or info.n_swa else length

    def _is_sound(self, chunk: int) -> bool:
        return chunk in self.store and self.engine.is_sound(self.store.page(chunk).filled)

    def check(self) -> None:
        """Raise DeviceLost if a server no longer answers. No server is asked once the model is closed."""
        if self.engine.is_lost:
            with self.told():
                self.engine.check_lost()

    @contextmanager
    def told(self) -> Iterator[None]:
        """Add to a DeviceLost that is raised meanwhile how much is kept."""
        try:
            yield
        except DeviceLost as err:
            self.tell(err)
            raise

    def tell(self, err: DeviceLost) -> None:
        """Add to the error how much is kept."""
        err.kept = self.kept
