"""What a server is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..batching.messages import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """keys: any of them opens the server; none: it is open. cors: origins that a browser may ask from.

    isolate_keys: a key sees and touches its own conversations only: see `Access`. max_body: bytes.
    default_tokens, most_tokens: of an answer, None for as many as the context has. Times are in seconds. page: serve it
    at "/". public_metrics: without a key. sampling: for requests that do not say how. strict: refuse
    fields that are not known.
    """

    alias: str
    host: str = "127.0.0.1"
    port: int = 8080
    keys: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    isolate_keys: bool = False
    max_queue: int = 256
    max_queued_tokens: int | None = None
    max_body: int = 32 << 20
    default_tokens: int = 4096
    most_tokens: int | None = None
    timeout_s: float = 3600.0
    queue_timeout_s: float = 600.0
    stall_timeout_s: float = 60.0
    drain_s: float = 30.0
    ping_s: float = 15.0
    park_bytes: int = 8 << 30
    session_dir: Path | None = None
    page: bool = True
    public_metrics: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    strict: bool = False

    @property
    def loopback(self) -> bool:
        return self.host in LOOPBACK


LOOPBACK = ("127.0.0.1", "localhost", "::1")
