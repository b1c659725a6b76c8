"""The settings of a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .. import notation
from ..batching.messages import Sampling
from ..media.files import MediaLimits
from ..settings import in_section

_net = in_section("Network")
_limits = in_section("Limits")
_conversations = in_section("Conversations")
_server = in_section("Server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the HTTP server; what each of them means stands beside it. Times are in seconds.

    aliases: further names of the model. keys: each of them opens the server; none: it is open. sampling: for requests
    that do not say how.
    """

    alias: str
    aliases: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    page: bool = _server(
        bool, "--page/--no-page", "--ui/--no-ui", "--webui/--no-webui", default=True, help="Serve the chat page at /."
    )
    strict: bool = _server(
        bool, default=False, help="Answer 400 to an unknown field; without this the server ignores it."
    )
    steady_prompts: bool = _server(
        bool, "--steady-prompts/--no-steady-prompts", default=True,
        help="Leave out of prompts what Claude Code changes in each request: cch= at their beginning.",
    )  # fmt: skip
    host: str = _net(notation.word, default="127.0.0.1", metavar="NAME", help="Address to listen at.")
    port: int = _net(int, least=0, most=65535, default=8080, help="Port to listen at; 0 is any free one.")
    cors: tuple[str, ...] = _net(
        notation.origin, "--cors-origins", default=(), many=True, metavar="ORIGIN",
        help="Origin whose pages may call the server; may be repeated.  [default: none]",
    )  # fmt: skip
    ssl_key_file: Path | None = _net(Path, metavar="FILE", exists=True, help="Key of the certificate, in PEM.")
    ssl_cert_file: Path | None = _net(
        Path, metavar="FILE", exists=True, help="Serve https with this certificate, in PEM."
    )
    api_prefix: str = _net(
        notation.prefix, default="", metavar="PATH", shown=False, help="Serve everything below this path, as /llm."
    )
    isolate_keys: bool = _net(bool, default=False, help="A key sees, uses and changes its own conversations only.")
    public_metrics: bool = _net(bool, "--metrics-public", default=False, help="/metrics needs no key.")
    park_bytes: int = _conversations(
        notation.size, "--park-memory", default=8 << 30, metavar="SIZE", shown=False,
        help="Host memory for idle conversations; the least recently used leaves it first.  [default: 8G]",
    )  # fmt: skip
    session_dir: Path | None = _conversations(
        Path, "--session-dir", "--slot-save-path", metavar="DIR",
        help="Folder for those without room there, and for all when the server ends.",
    )  # fmt: skip
    store: str | None = _conversations(
        notation.word, metavar="URL",
        help="Store that servers of one model share, with kvflash-fleet: a folder, or a URL of fsspec, as s3://bucket/texts.",
    )  # fmt: skip
    store_bandwidth: int = _conversations(
        notation.size, default=0, metavar="SIZE", shown=False,
        help="Bytes per second to and from the store, at most.  [default: no limit]",
    )  # fmt: skip
    max_queue: int = _limits(int, least=1, default=256, help="Requests that may wait; a further one gets 429.")
    max_queued_tokens: int | None = _limits(
        notation.tokens, least=1, help="Prompt tokens that may wait.  [default: 4 x -c]"
    )
    max_body: int = _limits(
        notation.size, default=32 << 20, metavar="SIZE", shown=False,
        help="Largest request; a larger one gets 413.  [default: 32M]",
    )  # fmt: skip
    max_images: int = _limits(int, least=1, default=16, metavar="N", help="Most images and sounds of a request.")
    max_image_bytes: int = _limits(
        notation.size, "--max-image-size", default=10 << 20, metavar="SIZE", shown=False,
        help="Largest file of an image or a sound.  [default: 10M]",
    )  # fmt: skip
    max_image_pixels: int = _limits(
        int, least=1, most=1 << 28, default=MediaLimits().pixels, metavar="N", help="Most pixels of an image."
    )
    max_audio_seconds: int = _limits(
        int, least=1, most=1 << 14, default=MediaLimits().seconds, metavar="N", help="Longest sound in seconds."
    )
    media_urls: bool = _limits(
        bool, default=False, help="Fetch images that a request names by a URL, from public addresses alone."
    )
    overflow: Literal["error", "roll"] = _limits(
        ("error", "roll"), default="error",
        help="A chat that outgrows the context: error: 400. roll: its oldest messages leave the prompt, the system"
        " message stays, and the answer says so.",
    )  # fmt: skip
    default_tokens: int = _limits(
        notation.limit, "-n", "--max-tokens-default", "--predict", "--n-predict", default=-1, metavar="N",
        help="Longest answer in tokens, where the request names no limit; -1: up to the end of the context.",
    )  # fmt: skip
    most_tokens: int | None = _limits(
        notation.tokens, "--max-tokens-limit", least=1,
        help="Longest answer in tokens, whatever the request says.  [default: the context]",
    )  # fmt: skip
    timeout_s: float = _limits(
        float, "--timeout", "-to", least=0, above=True, default=3600, metavar="S",
        help="Seconds for a request, from its arrival to its end.",
    )  # fmt: skip
    queue_timeout_s: float = _limits(
        float, "--queue-timeout", least=0, above=True, default=600, metavar="S",
        help="Seconds that a request may wait for its turn.",
    )  # fmt: skip
    itl_target_ms: float | None = _limits(
        float, "--itl-target", least=0, above=True, metavar="MS",
        help="Milliseconds between two tokens of a stream while another prompt is read, at most. Prompt steps become"
        " shorter, or answers take several steps between them.  [default: prompt steps of 1,024 tokens]",
    )  # fmt: skip
    stall_timeout_s: float = _limits(
        float, "--stall-timeout", least=0, above=True, default=60, metavar="S",
        help="Seconds to wait for a client that stops reading or sending.",
    )  # fmt: skip
    drain_s: float = _limits(
        float, "--drain", least=0, default=30, metavar="S",
        help="Seconds that running answers get when the server ends.",
    )  # fmt: skip
    ping_s: float = 15.0
    sampling: Sampling = field(default_factory=Sampling)

    @property
    def loopback(self) -> bool:
        return self.host in LOOPBACK


LOOPBACK = ("127.0.0.1", "localhost", "::1")
