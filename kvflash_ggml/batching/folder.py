"""Conversations as files, for the next start of the server."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..snapshot.inspect import removable
from .access import Access

logger = logging.getLogger("kvflash_ggml")

SUFFIX = ".kvs"

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
"""What a file may be called: never a path, and never hidden."""

_PARKED = re.compile(r"(?P<id>c-[0-9a-f]{16})~(?P<salt>[0-9a-f]*)~(?P<prompt>[0-9]{1,12})\.kvs")


@dataclass(slots=True, kw_only=True, eq=False)
class Stored:
    """A conversation's file. current: it has all of it. places: where, before its end, it can be gone on from."""

    path: Path
    id: str
    salt: str
    prompt: int
    places: Sequence[int] | None
    current: bool = True

    @property
    def bytes(self) -> int:
        """On the disk; none of a file that has gone."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def delete(self) -> None:
        """A disk that fails leaves it there: the next start takes it over."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as err:
            logger.warning("%s cannot be deleted: %s", self.path, err.strerror or err)


class Folder:
    """`parked/` in it has what the server puts aside; files of names that users give lie beside that. What killed
    processes have left unfinished there is deleted.

    ConfigError if it cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._parked = self.path / "parked"
        try:
            self._parked.mkdir(parents=True, exist_ok=True)
            probe = self._parked / ".writable"
            probe.touch()
            probe.unlink(missing_ok=True)  # another server may begin here
            for left in removable(self._parked):
                left.path.unlink(missing_ok=True)
        except OSError as err:
            raise ConfigError(
                f"cannot write to the session folder {path}: {err.strerror or err}: name a folder that can be written"
            ) from err

    @property
    def free(self) -> int:
        """Bytes that its disk still takes."""
        return shutil.disk_usage(self._parked).free

    def named(self, name: str, salt: str) -> Path:
        """The file of a name that a user gives, for a text of this salt. ConfigError if it is none."""
        return self.path / f"{self._stem(name)}{f'~{salt}' if salt else ''}{SUFFIX}"

    def find(self, name: str, access: Access) -> tuple[Path, str] | None:
        """The newest file of this name that `access` may see, and its text's salt. ConfigError if it is no name."""
        stem = self._stem(name)
        paths = [self.path / f"{stem}{SUFFIX}", *self.path.glob(f"{stem}~*{SUFFIX}")]
        salts = {path: path.stem[len(stem) + 1 :] for path in paths if path.is_file()}
        own = [path for path, salt in salts.items() if access.may(salt)]
        newest = max(own, key=lambda path: path.stat().st_mtime_ns, default=None)
        return None if newest is None else (newest, salts[newest])

    @staticmethod
    def _stem(name: str) -> str:
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{name[:80]!r} cannot name a file: use 1 to 128 of A-Z, a-z, 0-9, '.', '_' and '-', not beginning "
                f"with a dot"
            )
        return name.removesuffix(SUFFIX)

    def place(self, id: str, salt: str, prompt: int, *, places: Sequence[int] | None) -> Stored:
        """Where a conversation goes."""
        return Stored(
            path=self._parked / f"{id}~{salt}~{prompt}{SUFFIX}", id=id, salt=salt, prompt=prompt, places=places
        )

    def stored(self) -> Iterator[Stored]:
        """What is there, the one written longest ago first. Other files are left alone."""
        found = []
        for path in self._parked.iterdir():
            match = _PARKED.fullmatch(path.name)
            if match is not None and path.is_file() and not path.is_symlink():
                found.append((path.stat().st_mtime, path, match))
        for _, path, match in sorted(found, key=lambda entry: entry[:2]):
            yield Stored(path=path, id=match["id"], salt=match["salt"], prompt=int(match["prompt"]), places=None)
