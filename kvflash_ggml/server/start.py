"""A server for a `Llama`."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

from ..batching.llama import LlamaModel
from .prompts import Embedder, LlamaPrompts
from .run import listen, serve
from .settings import ServerSettings

if TYPE_CHECKING:
    from ..llama.llama import Llama


__all__ = ["listen", "start"]


def start(
    llm: Llama,
    settings: ServerSettings,
    sock: socket.socket,
    *,
    template: str | None,
    found: Callable[[int], None],
    ready: Callable[[str], None],
    embedder: Embedder | None = None,
    until: BinaryIO | None = None,
) -> None:
    """Serve a model with a pool until a signal ends it; the model is closed then. See `serve`."""
    prompts = LlamaPrompts(llm, template)
    serve(LlamaModel(llm), prompts, settings, sock, found=found, ready=ready, embedder=embedder, until=until)
