"""What differs between operating systems. Only this file names calls that Linux has and others do not.

Where a system lacks a call, its function here does less, and its docstring says what.
docs/troubleshooting.md lists the differences for users.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import asyncio
    import socket


def _module(name: str) -> Any:
    """Return a module of the standard library, or None where the system has none."""
    try:
        return __import__(name)
    except ImportError:
        return None


_fcntl = _module("fcntl")
_msvcrt = _module("msvcrt")
_resource = _module("resource")
_termios = _module("termios")

_FAR = 1 << 40
"""The byte that Windows locks: others cannot read a locked byte, so it lies behind the data."""

_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
_CGROUP = Path("/sys/fs/cgroup")
_CGROUPS_OF_PROCESS = Path("/proc/self/cgroup")
_SCHEDSTAT = Path("/proc/thread-self/schedstat")

_seeking = threading.Lock()

END_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that end a program; a terminal that is closed sends SIGHUP, which Windows does not have."""

RENAMES_OPEN_FILES = os.name != "nt"
"""Whether a file that is open can be moved."""


# --- files


def open_file(path: Path, flags: int = os.O_RDONLY, *, follow: bool = True, mode: int = 0o666) -> int:
    """Return a file descriptor that child processes do not get. Never wait for a pipe's writer. Raises OSError.

    follow: a link is an error without it. A system without O_NOFOLLOW follows links, and one without O_NONBLOCK waits.
    """
    more = ["O_NONBLOCK", "O_CLOEXEC", "O_NOINHERIT", "O_BINARY", *([] if follow else ["O_NOFOLLOW"])]
    for name in more:
        flags |= getattr(os, name, 0)
    return os.open(path, flags, mode)


def try_lock(file: int, *, shared: bool = False) -> bool:
    """Lock an open file until it is closed, however the process ends. Return False if another holder has it.

    shared: several holders may have a shared lock. On Windows each lock excludes all others.
    A system with neither kind of lock locks nothing, and returns True. OSError if the file cannot be locked.
    """
    if _fcntl is not None:
        with contextlib.suppress(BlockingIOError):
            _fcntl.flock(file, (_fcntl.LOCK_SH if shared else _fcntl.LOCK_EX) | _fcntl.LOCK_NB)
            return True
        return False
    if _msvcrt is not None:
        at = os.lseek(file, 0, os.SEEK_CUR)
        os.lseek(file, _FAR, os.SEEK_SET)
        try:
            _msvcrt.locking(file, _msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        finally:
            os.lseek(file, at, os.SEEK_SET)
    return True


def read_at(file: int, out: memoryview, offset: int) -> int:
    """Read up to len(out) bytes at `offset` into `out`, and return how many. 0 at the end of the file.

    Threads read one after the other where the system has no preadv.
    """
    if hasattr(os, "preadv"):
        return os.preadv(file, [out], offset)
    with _seeking:
        os.lseek(file, offset, os.SEEK_SET)
        data = os.read(file, len(out))
    out[: len(data)] = data
    return len(data)


def allow_files() -> None:
    """Raise this process's limit of open files to what the system lets it have. Elsewhere there is no such limit.

    A text keeps the file that it came from open while some of it is only there. There are thousands of texts.
    """
    if _resource is None:
        return
    most = _resource.getrlimit(_resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):  # a system that has no number for it
        _resource.setrlimit(_resource.RLIMIT_NOFILE, (most, most))


# --- memory and cores


def host_memory() -> tuple[int, int]:
    """Return the host's memory in bytes: all that this process may have, and what is free without swapping.

    A container counts by its limit. All of it counts as free where only the total is known, as on macOS.
    (0, 0) where nothing is known.
    """
    if (windows := getattr(ctypes, "windll", None)) is not None:
        return _windows_memory(windows)
    total = _meminfo("MemTotal") or _physical()
    left = _meminfo("MemAvailable") or total
    if (container := _limit()) is not None:
        total, left = min(total, container[0]), min(left, container[1])
    return total, min(total, left)


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory now; 0 where the system does not tell."""
    try:
        pages = int(_STATM.read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class _MemoryStatus(ctypes.Structure):
    """Windows' MEMORYSTATUSEX."""

    _fields_ = [
        ("size", ctypes.c_uint32), ("load", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("total", "free", "_3", "_4", "_5", "_6", "_7")),
    ]  # fmt: skip


def _windows_memory(windows: Any) -> tuple[int, int]:
    status = _MemoryStatus(size=ctypes.sizeof(_MemoryStatus))
    known = windows.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
    return (status.total, status.free) if known else (0, 0)


def _physical() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


def _meminfo(field: str) -> int | None:
    """Read a field of /proc/meminfo in bytes, None where the system does not tell."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(found[0]) * 1024 if found else None


def _limit() -> tuple[int, int] | None:
    """Return the bytes that a control group allows, and how many are left. The system gives back unused file pages."""
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        stat = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    files = sum(int(line.split()[1]) for line in stat if line.startswith("inactive_file "))
    return (int(limit), max(0, int(limit) - used + files)) if limit.isdigit() else None


def cores() -> int:
    """Return how many cores this process may use; all of the machine's where the system does not tell.

    The quota of a control group counts, rounded up: 1.5 cores are two threads, each of them held up now and then.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([count, *map(math.ceil, _quotas())]))


def _quotas() -> list[float]:
    """Return the cores that each control group above this process allows."""
    try:
        lines = _CGROUPS_OF_PROCESS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        home, group = _CGROUP / "cpu" if controllers else _CGROUP, Path(path.lstrip("/"))
        for part in {group, *group.parents, Path()}:  # in a container its own group is at the root
            found += _quota(home / part)
    return found


def _quota(group: Path) -> list[float]:
    """Return the cores that a control group allows, of version 2 or 1; nothing without a limit."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            words = " ".join((group / name).read_text(encoding="ascii") for name in names).split()
            quota, period = map(int, words)  # "max" is no number
            return [quota / period] if quota > 0 else []
    return []


def core_times() -> tuple[int, int] | None:
    """Return the nanoseconds that this thread has run, and those that it waited for a core. None if nothing tells."""
    with contextlib.suppress(OSError, ValueError):
        ran, waited, _ = map(int, _SCHEDSTAT.read_text(encoding="ascii").split())
        return ran, waited
    return None


def has_ended(child: int) -> bool:
    """Return whether a child process has ended, and leave its status to whoever waits for it. child: its id.

    False where the system has no waitid: only whoever waits for it hears of its end there.
    """
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # somebody has waited for it
        return True


# --- terminals, sockets, signals


@contextlib.contextmanager
def typed_lines_kept(stream: TextIO) -> Iterator[None]:
    """Keep the lines that were typed ahead on a terminal when Ctrl-C comes. Without termios the terminal drops them."""
    if _termios is None:
        yield
        return
    before = _termios.tcgetattr(stream)
    changed = [*before]
    changed[3] |= _termios.NOFLSH
    _termios.tcsetattr(stream, _termios.TCSANOW, changed)
    try:
        yield
    finally:
        _termios.tcsetattr(stream, _termios.TCSANOW, before)


def unsent_bytes(sock: socket.socket) -> int:
    """Return the bytes that the kernel keeps because the other end has not taken them. 0 where it does not tell."""
    asked = getattr(_termios, "TIOCOUTQ", None)
    if _fcntl is None or asked is None:
        return 0
    with contextlib.suppress(OSError):
        return int.from_bytes(_fcntl.ioctl(sock.fileno(), asked, bytes(4)), sys.byteorder)
    return 0


def on_signals(loop: asyncio.AbstractEventLoop, numbers: Sequence[int], call: Callable[[], None]) -> None:
    """Call `call` on the loop's thread when one of these signals comes. From the main thread."""
    for number in numbers:
        try:
            loop.add_signal_handler(number, call)
        except NotImplementedError:  # loops on Windows take no signals
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(call))
