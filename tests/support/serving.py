"""A server in a process of its own, for tests that speak to it by sockets."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvflash_bench.sockets import Server, begun, running


class Served(Server):
    def post(self, path: str, data: Any) -> tuple[int, Any]:
        reply = self.ask(path, data)
        return reply.status, reply.body

    def get(self, path: str) -> tuple[int, Any]:
        reply = self.ask(path)
        return reply.status, reply.body

    def frames(self, path: str, data: Any) -> Iterator[Any]:
        """Of a stream, as they come; left early, the connection is closed."""
        with self.stream(path, data) as (status, frames):
            assert status == 200
            yield from frames

    def stop(self, number: int = signal.SIGTERM, timeout: float = 120) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)


@contextmanager
def serve(model: Path | None, *options: str, python: Path = Path(sys.executable)) -> Iterator[Served]:
    """model: None for one that the options name. python: of an environment that has the package; that of the tests."""
    given = [] if model is None else [str(model)]
    line = [str(python), "-m", "kvflash_ggml", "serve", *given, "--port", "0", "-t", "1", *options]
    # with python -m the folder counts, and the checkout is not what is installed
    where = {"env": {**os.environ, "OMP_WAIT_POLICY": "passive"}, "cwd": Path(__file__).parent}
    with running(Served(begun(line, **where))) as served:
        try:
            yield served
        finally:
            served.process.kill()  # whoever has not stopped it does not ask how it ends
