"""Conversations as files, for the next start of the server."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from .folder import Folder, file_stat

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
        stat = file_stat(self.path)
        return 0 if stat is None else stat.st_size

    @property
    def written(self) -> float:
        """When, in seconds since 1970; 0 of a file that has gone."""
        stat = file_stat(self.path)
        return 0.0 if stat is None else stat.st_mtime


class SessionFolder:
    """`parked/` in it has what the server puts aside. Files of names that users give lie beside that.

    ConfigError if it cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.parked = Folder(self.path / "parked", _PARKED, what="conversations")
        probe = self.parked.path / ".writable"
        try:
            probe.touch()
            probe.unlink(missing_ok=True)  # another server may begin here
        except OSError as err:
            raise self.parked.error(err) from err

    def named(self, name: str, salt: str) -> Path:
        """The file of a name that a user gives, for a text of this salt. ConfigError if it is none."""
        return self.path / f"{self._stem(name)}{f'~{salt}' if salt else ''}{SUFFIX}"

    def find(self, name: str, may: Callable[[str], bool]) -> tuple[Path, str] | None:
        """The newest file of this name whose text's salt passes `may`, and that salt. ConfigError if it is no name."""
        stem = self._stem(name)
        paths = [self.path / f"{stem}{SUFFIX}", *self.path.glob(f"{stem}~*{SUFFIX}")]
        salts = {path: path.stem[len(stem) + 1 :] for path in paths if path.is_file()}
        own = [path for path, salt in salts.items() if may(salt)]
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
            path=self.parked.path / f"{id}~{salt}~{prompt}{SUFFIX}", id=id, salt=salt, prompt=prompt, places=places
        )

    def stored(self) -> list[Stored]:
        """What is there, the one written longest ago first."""
        found = [
            Stored(path=path, id=name["id"], salt=name["salt"], prompt=int(name["prompt"]), places=None)
            for path, name in self.parked.files(self.parked.path)
        ]
        return sorted(found, key=lambda one: one.written)
