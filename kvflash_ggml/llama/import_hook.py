"""Puts our class into llama_cpp when that is imported, in a process that `kvflash-run exec` has started."""

from __future__ import annotations

import logging
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

from .. import env, logs
from ..native import library


def replaced(spec: ModuleSpec) -> ModuleSpec:
    """Return the spec of llama_cpp, whose loading ends with `install` if the environment asks for it."""
    if not env.install():
        return spec
    assert spec.loader is not None
    spec.loader = _InstallingLoader(spec.loader)
    return spec


class _InstallingLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        library.load()
        from .install import install

        # the program would say nothing of a pool: whoever started it wants to see the banner
        logs.show_on(logging.StreamHandler(), logging.INFO)
        install()
