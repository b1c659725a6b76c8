"""A server in a process of its own, and clients that speak to it by sockets."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

READY = re.compile(r"serving .* at http://127\.0\.0\.1:(\d+)")


@dataclass
class Served:
    """port: where it listens. lines: what it has said on stderr."""

    process: subprocess.Popen[str]
    port: int = 0
    lines: list[str] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)

    def listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            found = READY.search(line)
            if found:
                self.port = int(found[1])
                self.ready.set()
        self.ready.set()

    def connect(self, timeout: float = 60) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def post(self, path: str, data: Any) -> tuple[int, Any]:
        connection = self.connect()
        try:
            connection.request("POST", path, json.dumps(data), {"content-type": "application/json"})
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()

    def get(self, path: str) -> tuple[int, Any]:
        connection = self.connect()
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            body = reply.read().decode()
            return reply.status, json.loads(body) if body.startswith(("{", "[")) else body
        finally:
            connection.close()

    def stream(self, path: str, data: Any) -> Iterator[Any]:
        """The events of a stream, as they come; left early, the connection is closed."""
        connection = self.connect()
        try:
            connection.request("POST", path, json.dumps({**data, "stream": True}), {"content-type": "application/json"})
            reply = connection.getresponse()
            assert reply.status == 200, reply.read()
            for line in reply:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
        finally:
            connection.close()

    def stop(self, number: int = signal.SIGTERM, timeout: float = 30) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)


@contextmanager
def serve(model: Path, *options: str, python: Path = Path(sys.executable)) -> Iterator[Served]:
    """python: of an environment that has the package; that of the tests."""
    line = [str(python), "-m", "kvflash_ggml", "serve", str(model), "--port", "0", "-t", "1", *options]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    process = subprocess.Popen(
        line,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=Path(__file__).parent,  # with python -m the folder counts, and the checkout is not what is installed
    )
    served = Served(process)
    listener = threading.Thread(target=served.listen, daemon=True)
    listener.start()
    try:
        assert served.ready.wait(60)
        assert served.port, "".join(served.lines)
        yield served
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait(30)
        listener.join(10)
        assert process.stderr is not None
        process.stderr.close()
