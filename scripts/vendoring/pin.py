"""What is pinned, where things live, and the small tools every vendoring module shares."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:  # pip is a build requirement and carries a parser
    from pip._vendor import tomli as tomllib

REPO = Path(__file__).resolve().parents[2]
PIN_FILE = REPO / "vendor" / "pin.toml"


class VendorError(Exception):
    """Something about the vendored source is wrong; the message says what to do about it."""


@dataclass(frozen=True, slots=True)
class Pin:
    """The contents of ``vendor/pin.toml``."""

    name: str
    version: str
    size: int
    sha256: str
    commit: str
    ggml: str
    subpath: str
    extract: tuple[str, ...]
    bindings: tuple[str, ...]

    @property
    def requirement(self) -> str:
        """The exact requirement, as pip spells it."""
        return f"{self.name}=={self.version}"

    @property
    def root(self) -> str:
        """Name of the only folder at the top of the sdist."""
        return f"{self.name.replace('-', '_')}-{self.version}"

    @property
    def filename(self) -> str:
        """File name of the sdist."""
        return f"{self.root}.tar.gz"


def load_pin(path: Path = PIN_FILE) -> Pin:
    """Read and check the pin file."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    sdist, llama = data["sdist"], data["llama"]
    return Pin(
        name=sdist["name"],
        version=sdist["version"],
        size=sdist["size"],
        sha256=sdist["sha256"],
        commit=llama["commit"],
        ggml=llama["ggml"],
        subpath=llama["subpath"],
        extract=tuple(llama["extract"]),
        bindings=tuple(data["bindings"]["extract"]),
    )


def cache_dir() -> Path:
    """The user's cache folder for this project; never inside the checkout, so clones share it."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvflash_ggml"


def log(message: str) -> None:
    """One progress line on stderr: stdout belongs to the command's answer."""
    print(f"kvflash: {message}", file=sys.stderr, flush=True)


def digest(*parts: bytes | str) -> str:
    """SHA-256 over length-prefixed parts, so that no two part lists collide."""
    sha = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        sha.update(len(raw).to_bytes(8, "little"))
        sha.update(raw)
    return sha.hexdigest()


def digest_files(root: Path, files: Iterable[Path]) -> str:
    """Digest of names (relative to `root`) and contents."""
    parts: list[bytes | str] = []
    for file in sorted(files):
        parts += [file.relative_to(root).as_posix(), file.read_bytes()]
    return digest(*parts)


def sha256_file(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    sha = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            sha.update(piece)
    return sha.hexdigest()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` (created if missing); a killed holder releases it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        try:
            import fcntl
        except ModuleNotFoundError:  # no flock on Windows: builds there are on the user's honour
            yield
            return
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"waiting for another build to release {path}")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
