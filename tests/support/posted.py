"""Forms with files, as programs post them."""

from __future__ import annotations

from typing import Any

BOUNDARY = "between-7f3a"


def form(file: bytes | None = b"", name: str = "speech.wav", **fields: str) -> dict[str, Any]:
    """What `Client.call` takes for a form with these fields. file: None for none."""
    parts = [
        f'Content-Disposition: form-data; name="{field}"\r\n\r\n{value}'.encode() for field, value in fields.items()
    ]
    if file is not None:
        head = f'Content-Disposition: form-data; name="file"; filename="{name}"\r\nContent-Type: audio/wav\r\n\r\n'
        parts.append(head.encode() + file)
    data = b"".join(b"--%b\r\n%b\r\n" % (BOUNDARY.encode(), part) for part in parts)
    kind = f"multipart/form-data; boundary={BOUNDARY}"
    return {"raw": data + b"--%b--\r\n" % BOUNDARY.encode(), "content_type": kind}
