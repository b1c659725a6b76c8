"""A server in a process of its own, and clients that speak to it by sockets."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGILL
from typing import Any, TypeVar

from kvflash_ggml.constants import KV_TYPES
from kvflash_ggml.errors import KVFlashError

_READY = re.compile(r"serving .* at http://127\.0\.0\.1:(\d+)")
_JSON = {"content-type": "application/json"}
START_S = 300
PATIENCE_S = 600
END_S = 60


@dataclass(frozen=True, slots=True)
class Reply:
    """body: text if it is no JSON. retry_after_s: what a refusal asks for."""

    status: int
    body: Any
    retry_after_s: float


@dataclass
class Server:
    """ready: what it says when it listens. port: where that is, 0 until then. lines: the newest that it has said. log:
    of its requests, by their ids; kept only of a server that writes one.
    """

    process: subprocess.Popen[str]
    ready: re.Pattern[str] = _READY
    port: int = 0
    lines: list[str] = field(default_factory=list)
    log: dict[str, dict[str, Any]] = field(default_factory=dict)
    _known: threading.Event = field(default_factory=threading.Event)
    _silent: threading.Event = field(default_factory=threading.Event)

    def listen(self) -> None:
        """Read what it says until it ends."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith('{"id": '):
                entry = json.loads(line)
                self.log[entry["id"]] = entry
                continue
            self.lines = [*self.lines[-20:], line]
            found = self.ready.search(line)
            if found:
                self.port = int(found[1])
                self._known.set()
        self._known.set()
        self._silent.set()

    def wait(self) -> None:
        """Until it takes requests. KVFlashError with its exit status and what it has said if it ends instead."""
        if not self._known.wait(START_S):
            raise KVFlashError(f"the server has not started in {START_S} s: {''.join(self.lines)}")
        if not self.port:
            raise KVFlashError(f"the server has not started, it {self.end()}")

    def end(self) -> str:
        """How it has ended, and what it said last. It has closed its connections, and may run on."""
        try:
            status = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return f"closed its connections, and has not ended in {END_S} s: {''.join(self.lines)}"
        self._silent.wait(END_S)
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        hint = "; its kernels for packed weights may not suit this CPU: try --no-repack" if status == -SIGILL else ""
        return f"ended {how}{hint}: {''.join(self.lines)}"

    def ask(self, path: str, data: dict[str, Any] | None = None, *, timeout_s: float = PATIENCE_S) -> Reply:
        """One request on a connection of its own, and all of its reply. TimeoutError if nothing comes for so long."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            if data is None:
                connection.request("GET", path)
            else:
                connection.request("POST", path, json.dumps(data), _JSON)
            reply = connection.getresponse()
            body = reply.read()
            kind = reply.headers.get_content_type()
            after = float(reply.headers.get("Retry-After-Ms", 0)) / 1e3
            return Reply(reply.status, json.loads(body) if kind == "application/json" else body.decode(), after)
        finally:
            connection.close()

    @contextmanager
    def stream(
        self, path: str, data: dict[str, Any], *, timeout_s: float = PATIENCE_S
    ) -> Iterator[tuple[int, Iterator[Any]]]:
        """The status and the frames of a stream as they come; left early, the connection is closed. TimeoutError as
        in `ask`.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("POST", path, json.dumps({**data, "stream": True}), _JSON)
            reply = connection.getresponse()
            yield reply.status, (json.loads(line[6:]) for line in reply if line.startswith(b"data: {"))
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """Name with labels to value."""
        text = self.ask("/metrics").body
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name.removeprefix("kvflash:"): float(value) for name, value in pairs}

    def cpu_seconds(self) -> float:
        """What all of its threads have computed so far: on a shared machine it says more than a clock. Of Linux."""
        text = (Path("/proc") / str(self.process.pid) / "stat").read_text(encoding="ascii")
        user, system = text.rsplit(")", 1)[1].split()[11:13]  # the name before it can have spaces
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def resources(self) -> dict[str, int]:
        """What the process has: bytes of memory without files, threads, open descriptors. Of Linux."""
        place = Path("/proc") / str(self.process.pid)
        status = dict(line.split(":", 1) for line in (place / "status").read_text(encoding="ascii").splitlines())
        return {
            "rss": int(status["VmRSS"].split()[0]) * 1024,
            "anonymous": int(status["RssAnon"].split()[0]) * 1024,
            "threads": int(status["Threads"]),
            "descriptors": len(list((place / "fd").iterdir())),
        }


Some = TypeVar("Some", bound=Server)


def begun(line: Sequence[str], **where: Any) -> subprocess.Popen[str]:
    """A process whose stderr is read. where: the folder and the environment it has, as of `subprocess.Popen`."""
    return subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **where)


@contextmanager
def running(server: Some) -> Iterator[Some]:
    """The same server once it takes requests; it is ended, and waited for."""
    process = server.process
    listener = threading.Thread(target=server.listen, daemon=True)
    listener.start()
    try:
        server.wait()
        yield server
        process.terminate()
        process.wait(END_S)
    finally:
        process.kill()
        process.wait()
        listener.join()
        assert process.stderr is not None
        process.stderr.close()


def served(model: str, options: Sequence[str], *, log: bool = False) -> AbstractContextManager[Server]:
    """A server of a model, with options of `kvflash-run serve`. log: of its requests."""
    line = [sys.executable, "-m", "kvflash_ggml", "serve", model, "--port", "0", *options, *(() if log else ("-q",))]
    return running(Server(begun(line)))


def serve_options(options: dict[str, Any], *, pool: int, n_ctx: int) -> list[str]:
    """Of `kvflash-run serve`, as a `Llama` with these keywords has them."""
    names = {kind: name for name, kind in KV_TYPES.items()}
    line = ["-c", str(n_ctx), "--kvflash", str(pool), "-ngl", str(options["n_gpu_layers"])]
    line += ["-b", str(options["n_batch"]), "-ub", str(options["n_ubatch"])]
    line += ["-ctk", names[options["type_k"]], "-ctv", names[options["type_v"]]]
    if options["n_threads"] is not None:
        line += ["-t", str(options["n_threads"])]
    if not options["use_extra_bufts"]:
        line += ["--no-repack"]
    if options["heads"] is not None:
        line += ["--kvflash-calibrate", str(options["heads"])]
    if "kvflash_index" in options:
        line += ["--kvflash-index", str(options["kvflash_index"])]
    return line
