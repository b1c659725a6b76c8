"""A model made of a few lines of Python, and the command line that runs on it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvflash_ggml.cli import main, model
from kvflash_ggml.sequence.reading import ReadStats
from kvflash_ggml.snapshot.container import Container, FileSource, Writer
from kvflash_ggml.trace.recorder import Trace

REPLY = "an answer"
BANNER = "kvflash: pool 1024 of 4096 tokens"


def stats() -> SimpleNamespace:
    return SimpleNamespace(
        pool=1024, n_ctx=4096, resident=16, chunks=84, page_ins=3, page_outs=83, bytes_in=1,
        bytes_out=2, host_bytes=3, device_bytes=4, policy="lru", epoch=5, type_k="f16",
        type_v="f16", pinned=False, evicted_mass=None, scored_every=None, banner=lambda: BANNER, record=Trace,
        calibrated=lambda progress, most: False, reading="exact", stage=4096, stage_bytes=7, index_bytes=0,
        streamed_steps=8, streamed_bytes=9, devices=(), last=ReadStats(read=4, read_whole=4, seen=4.0), spec=None,
    )  # fmt: skip


@dataclass
class FakeLlama:
    """One token a character. Echoes nothing: it answers REPLY, or what `replies` says."""

    settings: dict[str, Any]
    replies: list[str] = field(default_factory=list)
    template: bool = True
    on_token: Callable[[int], None] = lambda n: None
    on_prompt: Callable[[int], None] = lambda n: None
    error: Exception | None = None
    snapshot_error: Exception | None = None

    def __post_init__(self) -> None:
        self.metadata = {"tokenizer.chat_template": "x"} if self.template else {}
        self.chat_handler = self.settings.get("mmproj")
        self.kvflash = stats() if self.settings["kvflash"] is not None else None
        self.placement = None
        self.kvflash_progress: Callable[[int, int], None] | None = None
        self.kvflash_samplers: Any = None
        self.input_ids: list[int] = []
        self.n_tokens = 0
        self.requests: list[Any] = []
        self.closed = False

    def n_ctx(self) -> int:
        return 4096

    def generate(self, tokens: list[int], **settings: Any) -> Iterator[int]:
        if self.kvflash_progress is not None:
            for done in range(len(tokens)):
                self.on_prompt(done)
                self.kvflash_progress(done + 1, len(tokens))
        self.input_ids = list(tokens)
        self.n_tokens = len(tokens)
        for count, char in enumerate(self.replies.pop(0) if self.replies else REPLY):
            self.on_token(count)
            yield ord(char)

    def create_completion(self, text: str, **settings: Any) -> Iterator[dict[str, Any]]:
        self.requests.append((text, settings | {"samplers": self.kvflash_samplers}))
        yield from self._chunks(text, settings)

    def _chunks(self, text: str, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self.error is not None:
            raise self.error
        for token in self.generate(list(text.encode()), temp=self.kvflash_samplers.temperature):
            yield {"choices": [{"text": chr(token), "finish_reason": None}]}
        yield {"choices": [{"text": "", "finish_reason": "stop"}]}

    def create_chat_completion(self, messages: Any, **settings: Any) -> Iterator[dict[str, Any]]:
        self.requests.append(([dict(m) for m in messages], settings | {"samplers": self.kvflash_samplers}))
        text = "".join(m["content"] if isinstance(m["content"], str) else m["content"][-1]["text"] for m in messages)
        yield {"choices": [{"delta": {"role": "assistant"}, "finish_reason": None}]}
        for chunk in self._chunks(text, settings):
            choice = chunk["choices"][0]
            delta = {"content": choice["text"]} if choice["finish_reason"] is None else {}
            yield {"choices": [{"delta": delta, "finish_reason": choice["finish_reason"]}]}

    def load_snapshot(self, path: Path) -> int:
        if self.snapshot_error is not None:
            raise self.snapshot_error
        self.input_ids = list(Container(FileSource(path)).section("text").read())
        self.n_tokens = len(self.input_ids)
        return self.n_tokens

    def save_snapshot(self, path: Path, *, compress: bool) -> Future[int]:
        if self.snapshot_error is not None:
            raise self.snapshot_error
        done: Future[int] = Future()
        done.set_result(write_snapshot(path, bytes(self.input_ids[: self.n_tokens])))
        self.compressed = compress
        return done

    def close(self) -> None:
        self.closed = True


def write_snapshot(path: Path, text: bytes) -> int:
    """A sound container with nothing but a text."""
    with path.open("wb") as file:
        writer = Writer(file)
        writer.section("text", text)
        writer.close("snapshot", {})
        return file.tell()


@dataclass
class Stage:
    """Runs the command on a fake; `made` are the models it has loaded."""

    made: list[FakeLlama] = field(default_factory=list)
    fake: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *arguments: object, stdin: str = "", **fake: Any) -> Result:
        self.fake = fake
        return CliRunner().invoke(main, [str(x) for x in arguments], input=stdin, prog_name="kvflash-run")

    def create(self, **settings: Any) -> FakeLlama:
        self.made.append(FakeLlama(settings, **self.fake))
        return self.made[-1]

    @property
    def settings(self) -> dict[str, Any]:
        return self.made[-1].settings

    @property
    def request(self) -> Any:
        return self.made[-1].requests[-1][0]

    @property
    def sampling(self) -> dict[str, Any]:
        values: dict[str, Any] = self.made[-1].requests[-1][1]
        return values


def staged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """What a fixture yields: the command line on fakes."""
    stage = Stage()
    monkeypatch.setattr(model, "create_llama", stage.create)
    monkeypatch.setattr(model, "check_first_run", lambda *, repack: None)
    monkeypatch.setattr(model, "supports_gpu_offload", lambda: False)
    monkeypatch.setattr(model, "ensure_gpu_offload", lambda layers: None)
    yield stage


def interrupt_at(*counts: int) -> Callable[[int], None]:
    def on_token(count: int) -> None:
        for _ in range(counts.count(count)):
            signal.raise_signal(signal.SIGINT)

    return on_token
