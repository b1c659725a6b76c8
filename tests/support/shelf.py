"""Models of a folder that is none, and requests that hold their turn."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvflash_router.engines import Engines
from kvflash_router.model_folder import FolderModel


def shelved(name: str, changed: int = 0) -> FolderModel:
    return FolderModel(name=name, path=Path(f"{name}.gguf"), size=1, changed=changed)


class Visit:
    """A request that holds its turn until it is let go."""

    def __init__(self, engines: Engines, model: FolderModel) -> None:
        self._let_go = asyncio.Event()
        self.began = asyncio.Event()
        self.task = asyncio.ensure_future(self._run(engines, model))

    async def _run(self, engines: Engines, model: FolderModel) -> None:
        async with engines.turn(model):
            self.began.set()
            await self._let_go.wait()

    async def end(self) -> None:
        self._let_go.set()
        await self.task


async def settle() -> None:
    """Until nobody has anything to do but wait."""
    for _ in range(50):
        await asyncio.sleep(0)
