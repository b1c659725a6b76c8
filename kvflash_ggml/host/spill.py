"""Page images on disk, in a file without a name."""

from __future__ import annotations

import logging
import os
import tempfile
import zlib
from io import FileIO
from pathlib import Path

from ..errors import ConfigError, HostMemoryError, SnapshotError

logger = logging.getLogger("kvflash_ggml")


class SpillFile:
    """Images of `page_bytes` bytes in a file. The file is made in `folder` for the first image.

    Callers hold a lock. ConfigError if the folder cannot be written to.
    """

    def __init__(self, folder: Path, page_bytes: int) -> None:
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise ConfigError(f"spill = {folder} is no folder that can be written to: make it, or name another")
        self._folder = folder
        self._page_bytes = page_bytes
        self._file: FileIO | None = None
        self._places = 0  # in the file
        self._free: list[int] = []
        self._checksums: dict[int, int] = {}  # of the image at each place
        self._said = ""
        self.full = False  # the disk refused the last image

    @property
    def used(self) -> int:
        """Images in the file."""
        return len(self._checksums)

    def write(self, image: memoryview) -> int:
        """Write the image and return its place. HostMemoryError if the disk does not take it."""
        place = self._free[-1] if self._free else self._places
        checksum = zlib.crc32(image)
        try:
            if self._file is None:
                # without a name, so that nothing is left behind however the process ends; without a buffer, so that a
                # full disk shows here and not at some later call
                self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115
            self._file.seek(place * self._page_bytes)
            while image:
                image = image[self._file.write(image) :]
        except OSError as err:
            self._complain(f"could not write a chunk to {self._folder}: {err.strerror or err}")
            raise HostMemoryError(self._said) from err
        self.full = False
        if self._free:
            self._free.pop()
        else:
            self._places += 1
        self._checksums[place] = checksum
        return place

    def read(self, place: int, image: memoryview) -> None:
        """Fill `image`. HostMemoryError if it cannot be read, SnapshotError if it differs from what was written."""
        assert self._file is not None
        rest = image
        try:
            self._file.seek(place * self._page_bytes)
            while rest:
                read = self._file.readinto(rest)
                if not read:
                    raise OSError("the spill file was cut short")
                rest = rest[read:]
        except OSError as err:
            raise HostMemoryError(f"could not read a chunk back from {self._folder}: {err}") from err
        if zlib.crc32(image) != self._checksums[place]:
            raise SnapshotError(
                f"a chunk in the spill file in {self._folder} is damaged: read the text again, and check the disk"
            )

    def give_back(self, place: int) -> None:
        """Free a place: the file has room for another image, however full its disk is."""
        del self._checksums[place]
        self._free.append(place)
        self.full = False

    def _complain(self, why: str) -> None:
        """Log once that the disk is full: a full disk stays full."""
        self.full = True
        if why != self._said:
            self._said = why
            logger.warning("%s: kept texts are dropped, and prefilled again when they are needed: make room there", why)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
