"""An HTTP server that passes requests on, and lets some of them fail in each way that a store can."""

from __future__ import annotations

import http.client
import random
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULTS = ("refused", "applied", "cut", "dropped", "lost")
"""500 instead of the answer; 500 though it was done; half of the answer; none; none though it was done."""


class FlakyProxy:
    """port: where it listens. share: of the requests that fail. happened: how often each fault has. Close it."""

    def __init__(self, port: int, seed: int) -> None:
        self.share = 0.0
        self.happened = Counter[str]()
        draw, lock, proxy = random.Random(seed), threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:
                    self.close_connection = True

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                with lock:
                    fault = draw.choice(FAULTS) if draw.random() < proxy.share else ""
                    proxy.happened[fault] += 1
                status, headers, data = 500, [], b""
                if fault not in {"refused", "dropped"}:
                    status, headers, data = self.passed_on(body)
                if fault in {"dropped", "lost"}:
                    self.close_connection = True
                    return
                if fault == "applied":
                    status, headers, data = 500, [], b""
                self.send_response_only(status)
                for name, value in headers:
                    if name.lower() not in {"content-length", "connection", "transfer-encoding"}:
                        self.send_header(name, value)
                length = dict(headers).get("Content-Length") if self.command == "HEAD" else None
                self.send_header("Content-Length", length or str(len(data)))
                self.end_headers()
                if fault == "cut" and data:
                    self.wfile.write(data[: len(data) // 2])
                    self.close_connection = True
                elif self.command != "HEAD":
                    self.wfile.write(data)

            def passed_on(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
                try:
                    connection.request(self.command, self.path, body, dict(self.headers))
                    reply = connection.getresponse()
                    return reply.status, reply.getheaders(), reply.read()
                finally:
                    connection.close()

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
