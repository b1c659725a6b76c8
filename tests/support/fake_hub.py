"""A hub on loopback: what huggingface_hub asks to list a repository and to fetch its files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """One repository, `owner/model-GGUF`. asked: every request, as (method, path, its Range, its token).

    status: the answer to everything instead, and page its text. etag: of every file, instead of its hash. sizes: what
    is said of a file, instead of its length. cut: after how many bytes the next body ends. moved: files are at
    another host, `localhost`, as the large ones of a hub are.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    commit: str = COMMIT
    status: int | None = None
    page: str = "{}"
    etag: str | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    cut: int | None = None
    moved: bool = False
    url: str = ""
    asked: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)

    repo = "owner/model-GGUF"

    def described(self) -> dict[str, Any]:
        siblings = [
            {"rfilename": name, "size": len(data), "blobId": "x", "lfs": None} for name, data in self.files.items()
        ]
        return {"id": self.repo, "sha": self.commit, "siblings": siblings}

    def fetched(self) -> list[tuple[str, str | None]]:
        """The files that were sent, each with the Range that was asked for."""
        folder = "/cdn/" if self.moved else f"/{self.repo}/resolve/"
        gets = [(path, part) for method, path, part, _ in self.asked if method == "GET" and path.startswith(folder)]
        return [(path.rpartition("/")[2], part) for path, part in gets]


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((self.command, path, self.headers["Range"], self.headers["Authorization"]))
            if hub.status is not None:
                self._send(hub.page.encode(), status=hub.status)
            elif path == f"/api/models/{hub.repo}":
                self._send(json.dumps(hub.described()).encode())
            elif (name := path.removeprefix(f"/{hub.repo}/resolve/{hub.commit}/")) in hub.files and hub.moved:
                place = f"http://localhost:{self.server.server_address[1]}/cdn/{name}"
                size = {"X-Linked-Size": str(len(hub.files[name]))}
                self._send(b"", status=302, **self._tag(name), **size, Location=place)
            elif (name := name.removeprefix("/cdn/")) in hub.files:
                self._file(name)
            else:
                self._send(b"{}", status=404)

        def _file(self, name: str) -> None:
            data = hub.files[name]
            tag = self._tag(name)
            if (part := self.headers["Range"]) is None:
                length = hub.sizes.get(name, len(data)) if self.command == "HEAD" else len(data)
                cut, hub.cut = (None, hub.cut) if self.command == "HEAD" else (hub.cut, None)
                self._send(data[:cut], length=length, **tag)
            elif (start := int(part.removeprefix("bytes=").rstrip("-"))) < len(data):
                where = f"bytes {start}-{len(data) - 1}/{len(data)}"
                self._send(data[start:], status=206, **tag, **{"Content-Range": where})
            else:
                self._send(b"", status=416)

        def _tag(self, name: str) -> dict[str, str]:
            etag = hub.etag or hashlib.sha256(hub.files[name]).hexdigest()
            return {"ETag": f'"{etag}"', "X-Repo-Commit": hub.commit}

        def _send(self, data: bytes, *, status: int = 200, length: int | None = None, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data) if length is None else length), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
