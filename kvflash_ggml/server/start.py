"""A server for a `Llama`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..batching.llama import LlamaModel
from .prompts import LlamaPrompts
from .run import serve
from .settings import ServerSettings

if TYPE_CHECKING:
    from ..llama.llama import Llama


def start(llm: Llama, settings: ServerSettings, *, template: str | None, ready: Callable[[str], None]) -> None:
    """Serve a model with a pool until a signal ends it; the model is closed then. See `serve`."""
    prompts = LlamaPrompts(llm, template)
    serve(LlamaModel(llm), prompts, settings, ready=ready)
