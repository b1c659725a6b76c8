"""Named objects that several machines share: in a folder, or wherever `fsspec` reaches. Nothing here knows a text."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from kvflash_ggml import system
from kvflash_ggml.errors import ConfigError
from kvflash_ggml.files import PART, replacing

logger = logging.getLogger("kvflash_ggml")


@dataclass(frozen=True, slots=True)
class Listed:
    """An object of a listing. size: in bytes. modified: seconds since 1970, by the store's clock."""

    name: str
    size: int
    modified: float


MAX_OBJECT = 64 << 20
"""Bytes of the largest object that servers write. Of a larger one nobody reads more, so it costs little memory."""

LIMIT_S = 30.0
"""Seconds that a server waits for one operation: a block of 4 MiB comes in that time at 140 KB/s."""

MAX_HANGING = 8
"""Operations that hang at once. Each keeps a thread and perhaps a block; with so many, the next one fails at once."""

REST_S = 5.0
"""Seconds after a timeout in which every operation fails at once: a queue of writes waits for one of them only."""


class Objects(Protocol):
    """Objects by name, with slashes. Methods raise OSError if the store fails, and `get` FileNotFoundError."""

    def get(self, name: str) -> bytes:
        """Return the first MAX_OBJECT + 1 bytes of an object."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write an object that is named by its content: an object of this name has the same bytes."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Write an object atomically, unless there is one of this name; False if there is."""
        ...

    def list(self, prefix: str) -> list[Listed]:
        """Return the objects below a folder, sorted by name."""
        ...

    def delete(self, name: str) -> None:
        """Delete an object; one that is not there is no error."""
        ...


class FolderObjects:
    """Objects in a folder, which may lie on a network file system. The first object makes the folder.

    No write waits for the disk: checksums find the objects that a loss of power has damaged. A folder within it goes
    with its last object.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()

    def get(self, name: str) -> bytes:
        path = self._path / name
        handle = system.open_file(path)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise FileNotFoundError(f"{path} is no file")  # a pipe would let its reader wait
        with os.fdopen(handle, "rb") as file:
            return file.read(MAX_OBJECT + 1)

    def put(self, name: str, data: bytes) -> None:
        place = self._path / name
        with contextlib.suppress(FileNotFoundError):
            if place.stat().st_size == len(data):
                os.utime(place)  # so that `prune` leaves it: a state will use it
                return

        def write() -> None:
            with replacing(place, sync=False) as file:
                file.write(data)

        _below(place.parent, write)

    def create(self, name: str, data: bytes) -> bool:
        place = self._path / name
        part = place.parent / f".{place.name}.{secrets.token_hex(4)}{PART}"

        def write() -> None:
            with part.open("xb") as file:
                file.write(data)
            os.link(part, place)  # whole or not at all, and never over another

        try:
            _below(place.parent, write)
        except FileExistsError:
            # NFS may repeat a request that was done, and is refused then; an earlier try may have been done late
            with contextlib.suppress(FileNotFoundError):  # another server has deleted it
                return self.get(name) == data
            return False
        finally:
            part.unlink(missing_ok=True)
        return True

    def list(self, prefix: str) -> list[Listed]:
        def failed(err: OSError) -> None:
            if not isinstance(err, FileNotFoundError):
                raise err  # what cannot be read must not look as if it had been erased

        found = []
        for folder, _, names in os.walk(self._path / prefix, onerror=failed):
            for name in names:
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):  # another server has deleted it
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode):
                        found.append(Listed(path.relative_to(self._path).as_posix(), status.st_size, status.st_mtime))
        return sorted(found, key=lambda one: one.name)

    def delete(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # one that is not empty stays
            for folder in [*Path(name).parents][:-1]:
                (self._path / folder).rmdir()


def _below(folder: Path, write: Callable[[], None]) -> None:
    """Make a folder, and write in it. Another server may delete it in between, as an empty one."""
    for last in (False, False, True):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return write()
        except FileNotFoundError:
            if last:
                raise


_S3 = {"config_kwargs": {"connect_timeout": 5, "read_timeout": 20, "retries": {"max_attempts": 3}}}
"""Options of `s3fs`, whose own limits are minutes."""


class RemoteObjects:
    """Objects of a file system of `fsspec`: S3 with `s3fs`, and so on. ConfigError for a URL that it does not know."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec

            self._fs: Any
            self._s3 = url.startswith("s3://")
            self._fs, path = fsspec.core.url_to_fs(url, **(_S3 if self._s3 else {}))
        except ImportError as err:
            raise ConfigError(
                f"{url} needs a package that is not installed: pip install './fleet[s3]' in the checkout ({err})"
            ) from err
        except ValueError as err:
            raise ConfigError(f"{url} is no store: {err}: name a folder, or a URL that fsspec knows") from err
        self._root = path.rstrip("/")

    def get(self, name: str) -> bytes:
        path = f"{self._root}/{name}"
        with _os_errors():
            try:
                return bytes(self._fs.cat_file(path, end=MAX_OBJECT + 1))
            except Exception:
                if self._fs.size(path) == 0:
                    return b""  # S3 has no range of nothing
                raise

    def put(self, name: str, data: bytes) -> None:
        with _os_errors():
            self._fs.pipe_file(f"{self._root}/{name}", data)

    def create(self, name: str, data: bytes) -> bool:
        try:
            with _os_errors():
                self._fs.pipe_file(f"{self._root}/{name}", data, mode="create")
        except FileExistsError:
            return self.get(name) == data  # a client may repeat a request that was done, and is refused then
        return True

    def list(self, prefix: str) -> list[Listed]:
        folder = f"{self._root}/{prefix}".rstrip("/")
        with _os_errors():
            self._fs.invalidate_cache()
            infos = list(self._fs.find(folder, detail=True).values() if self._s3 else self._files(folder))
        root = f"{self._root}/".lstrip("/")
        found = [
            Listed(info["name"].lstrip("/").removeprefix(root), int(info["size"]), _modified(info)) for info in infos
        ]
        return sorted(found, key=lambda one: one.name)

    def _files(self, top: str) -> Iterator[dict[str, Any]]:
        """Yield the files below a folder. OSError; `find` of most file systems returns nothing if it can read none."""
        folders = [top]
        for folder in folders:  # which grows
            infos: Iterable[dict[str, Any]] = ()
            with contextlib.suppress(FileNotFoundError):
                infos = self._fs.ls(folder, detail=True)
            for info in infos:
                if info["type"] == "file":
                    yield info
                elif info["type"] == "directory" and info["name"].rstrip("/") not in folders:
                    folders.append(info["name"].rstrip("/"))

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), _os_errors():
            self._fs.rm_file(f"{self._root}/{name}")


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Turn the errors of libraries of object stores into OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as err:
        raise OSError(f"{type(err).__name__}: {err}") from err


_TIMES = ("LastModified", "last_modified", "mtime", "modified", "updated", "created", "creation_time")
"""Names that file systems of `fsspec` have for the time of writing."""


def _modified(info: dict[str, Any]) -> float:
    """Return when an object was written. OSError if the file system does not say: `prune` would delete it as old."""
    when = next((info[key] for key in _TIMES if info.get(key) is not None), None)
    if when is None:
        raise OSError(f"{info.get('name')}: this file system does not say when an object was written")
    return float(when.timestamp() if hasattr(when, "timestamp") else when)


T = TypeVar("T")


class TimedObjects:
    """Objects of a store that may hang, as a network file system does: after `limit_s` an operation is a TimeoutError.

    A `put` or `delete` may still be done later. An object that a `create` makes later is deleted again; until then
    another `create` of this name is a TimeoutError. name: of the store, for messages. rest_s: as REST_S. Any thread
    uses it.
    """

    def __init__(self, objects: Objects, *, name: str, limit_s: float = LIMIT_S, rest_s: float = REST_S) -> None:
        self._objects = objects
        self._name = name
        self._limit_s = limit_s
        self._rest_s = rest_s
        self._rests_until = -math.inf
        self._hanging: dict[threading.Thread, str | None] = {}  # with the name that it creates
        self._lock = threading.Lock()

    def get(self, name: str) -> bytes:
        return self._timed(lambda: self._objects.get(name))

    def put(self, name: str, data: bytes) -> None:
        self._timed(lambda: self._objects.put(name, data))

    def create(self, name: str, data: bytes) -> bool:
        return self._timed(lambda: self._objects.create(name, data), creates=name)

    def list(self, prefix: str) -> list[Listed]:
        return self._timed(lambda: self._objects.list(prefix))

    def delete(self, name: str) -> None:
        self._timed(lambda: self._objects.delete(name))

    def _timed(self, work: Callable[[], T], *, creates: str | None = None) -> T:
        done = Future[T]()

        def run() -> None:
            try:
                result = work()
            except BaseException as err:
                if done.set_running_or_notify_cancel():
                    done.set_exception(err)
                return
            if done.set_running_or_notify_cancel():  # not given up
                done.set_result(result)
            elif creates is not None and result:
                self._undo(creates)

        # a thread of its own: nothing else can leave an operation that hangs, and the process ends without it
        thread = threading.Thread(target=run, name="kvflash-object", daemon=True)
        if self._may_begin(creates):
            thread.start()
            if wait([done], self._limit_s).done or not done.cancel():
                return done.result()
            with self._lock:
                self._hanging[thread] = creates
                self._rests_until = time.monotonic() + self._rest_s
        raise TimeoutError(f"{self._name} has not answered for {self._limit_s:.0f} s")

    def _may_begin(self, creates: str | None) -> bool:
        with self._lock:
            self._hanging = {thread: name for thread, name in self._hanging.items() if thread.is_alive()}
            taken = creates is not None and creates in self._hanging.values()
            return not taken and len(self._hanging) < MAX_HANGING and time.monotonic() >= self._rests_until

    def _undo(self, name: str) -> None:
        """Delete what was created after its caller was told that it failed: an erased text must not come back."""
        warned = False
        while True:
            try:
                return self._objects.delete(name)
            except OSError as err:
                if not warned:
                    logger.warning("%s: %s was written too late, and cannot be deleted yet: %s", self._name, name, err)
                warned = True
            time.sleep(self._rest_s)


def open_objects(url: str, *, write: bool) -> Objects:
    """Return the objects at a URL or below a folder. ConfigError if they cannot be read, or, on request, written.

    write: for a server. Operations are limited to LIMIT_S then, and a store that lets two servers create the same
    object is refused.
    """
    objects: Objects
    if "://" in url and not url.startswith("file://"):
        objects = RemoteObjects(url)
    else:
        path = Path(url.removeprefix("file://"))
        if not write and not path.is_dir():
            raise ConfigError(f"{url} is no folder: name the one that serve --store was given")
        objects = FolderObjects(path)
    if write:
        objects = TimedObjects(objects, name=url)
        probe = f"probe-{secrets.token_hex(8)}"
        try:
            alone = objects.create(probe, b"1") and not objects.create(probe, b"2")
            objects.delete(probe)
        except OSError as err:
            raise ConfigError(
                f"cannot keep texts in {url}: {getattr(err, 'strerror', None) or err}: name a place that can be "
                f"written; a folder has to be on a file system with hard links"
            ) from err
        if not alone:
            raise ConfigError(f"{url} overwrites objects, though told not to: use a store with conditional writes")
    return objects
