"""The Python of the package imports where a system lacks what Linux has, and its fallbacks work."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvflash_ggml import system
from kvflash_ggml.files import PART, being_written, replacing
from kvflash_ggml.placement import memory
from kvflash_ggml.snapshot.container import FileSource
from kvflash_ggml.store.folder import Folder
from kvflash_router import serving

REPO = Path(__file__).parents[2]

LACKING = """
import importlib, os, pkgutil, signal, sys

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Lacking())
for name in ("fcntl", "resource", "termios"):
    sys.modules.pop(name, None)
for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "pread", "preadv", "sched_getaffinity", "sysconf", "waitid"):
    delattr(os, name)
del signal.SIGHUP
import kvflash_fleet, kvflash_ggml, kvflash_router
from kvflash_ggml import system
assert system._fcntl is system._termios is system._resource is None
assert len(system.END_SIGNALS) == 1
count = 0
PARTS = kvflash_ggml, kvflash_router, kvflash_fleet
packages = [pkgutil.walk_packages(one.__path__, f"{one.__name__}.") for one in PARTS]
for module in [module for modules in packages for module in modules]:
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as err:  # the unit tests need no library
        if (err.name or "").partition(".")[0] not in ("llama_cpp", "kvflash_ggml", "gguf", "huggingface_hub", "cffi"):
            raise
    count += 1
assert count > 150, count
"""


def test_every_module_imports_without_what_only_linux_has() -> None:
    done = subprocess.run([sys.executable, "-c", LACKING], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


class Msvcrt:
    """Windows' locks of bytes: whoever opened the file first has it."""

    LK_NBLCK = 2

    def __init__(self) -> None:
        self.locked: dict[tuple[int, int], int] = {}

    def locking(self, file: int, mode: int, count: int) -> None:
        assert (mode, count) == (self.LK_NBLCK, 1)
        assert os.lseek(file, 0, os.SEEK_CUR) > 1 << 32, "a locked byte cannot be read"
        key = (os.fstat(file).st_ino, os.lseek(file, 0, os.SEEK_CUR))
        if self.locked.setdefault(key, file) != file:
            raise PermissionError(13, "locked")


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Msvcrt:
    locks = Msvcrt()
    for name in ("_fcntl", "_resource", "_termios"):
        monkeypatch.setattr(system, name, None)
    monkeypatch.setattr(system, "_msvcrt", locks)
    monkeypatch.setattr(system, "RENAMES_OPEN_FILES", False)
    for name in ("preadv", "sched_getaffinity", "sysconf", "waitid", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"):
        monkeypatch.delattr(os, name, raising=False)
    return locks


def test_locks_of_windows_keep_others_out(windows: Msvcrt, tmp_path: Path) -> None:
    one, other = (system.open_file(tmp_path / "a", os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert system.try_lock(one)
    assert not system.try_lock(other)
    assert os.lseek(one, 0, os.SEEK_CUR) == 0
    os.close(one)
    os.close(other)
    with replacing(tmp_path / "b") as file:
        file.write(b"whole")
        (part,) = tmp_path.glob(f".b.*{PART}")
        assert being_written(part)
    assert (tmp_path / "b").read_bytes() == b"whole"
    assert len(windows.locked) == 2


def test_without_locks_files_are_written_all_the_same(
    windows: Msvcrt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "_msvcrt", None)
    with Folder(tmp_path, re.compile("a"), what="texts").locked(), replacing(tmp_path / "a") as file:
        file.write(b"whole")
    assert (tmp_path / "a").read_bytes() == b"whole"


def test_pieces_are_read_without_preadv(windows: Msvcrt, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(200)))
    out = bytearray(50)
    FileSource(tmp_path / "a").read_into(100, memoryview(out))
    assert out == bytes(range(100, 150))


def test_a_system_that_tells_little(windows: Msvcrt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_MEMINFO", "_CGROUP"):
        monkeypatch.setattr(system, name, tmp_path / "none")
    assert system.host_memory() == (0, 0)
    assert system.cores() == os.cpu_count()
    system.allow_files()
    with socket.socket() as sock:
        assert system.unsent_bytes(sock) == 0
    with system.typed_lines_kept(sys.stdin):
        pass


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/", {"cpu.max": "200000 100000"}, 2),
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "10000 100000"}, 1),
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "6400000 100000"}, 8),
        ("0::/a.slice/b", {"a.slice/cpu.max": "300000 100000", "a.slice/b/cpu.max": "max 100000"}, 3),
        ("0::/a.slice/b", {"cpu.max": "400000 100000"}, 4),
        ("3:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ("3:cpu,cpuacct:/x", {"cpu/x/cpu.cfs_quota_us": "50000", "cpu/x/cpu.cfs_period_us": "100000"}, 1),
        ("3:cpu,cpuacct:/x", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ("4:cpuset:/\n3:memory:/m", {"cpu.max": "100000 100000"}, 8),
        ("0::/", {"cpu.max": "damaged"}, 8),
        ("0::/", {}, 8),
    ],
)
def test_a_quota_of_a_control_group_bounds_the_cores(
    lines: str, files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"of process": lines, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n", encoding="ascii")
    monkeypatch.setattr(system, "_CGROUP", tmp_path)
    monkeypatch.setattr(system, "_CGROUPS_OF_PROCESS", tmp_path / "of process")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    assert system.cores() == expected


def test_the_times_of_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_SCHEDSTAT", tmp_path / "stat")
    assert system.core_times() is None
    (tmp_path / "stat").write_text("12 34 5\n", encoding="ascii")
    assert system.core_times() == (12, 34)


def child_of(process: subprocess.Popen[bytes], returncode: int | None = None) -> serving.Process:
    """The process of a model. returncode: as the loop has heard of it."""
    told: Any = SimpleNamespace(returncode=returncode, pid=process.pid)
    return serving.Process(port=1, n_ctx=1, _process=told, _patience_s=1)


def test_a_process_that_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert child_of(process).alive
        assert process.stdin is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not child_of(process).alive
    assert not child_of(process).alive, "somebody has waited for it"


def test_a_process_that_has_ended_without_waitid(windows: Msvcrt) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        assert child_of(process).alive
    assert not child_of(process, returncode=0).alive


def test_memory_as_macos_and_windows_tell_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_MEMINFO", "_CGROUP"):
        monkeypatch.setattr(system, name, tmp_path / "none")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert (memory.host().free, memory.host().total) == (total, total)

    def status(given: Any) -> int:
        assert given._obj.size == ctypes.sizeof(given._obj) == 64
        given._obj.total, given._obj.free = 8 << 30, 3 << 30
        return 1

    kernel = SimpleNamespace(kernel32=SimpleNamespace(GlobalMemoryStatusEx=status))
    monkeypatch.setattr(ctypes, "windll", kernel, raising=False)
    assert (memory.host().free, memory.host().total) == (3 << 30, 8 << 30)


def test_signals_where_the_loop_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)

    async def wait() -> None:
        loop, came = asyncio.get_running_loop(), asyncio.Event()

        def refuse(*_: Any) -> None:
            raise NotImplementedError

        monkeypatch.setattr(loop, "add_signal_handler", refuse)
        system.on_signals(loop, [signal.SIGTERM], came.set)
        signal.raise_signal(signal.SIGTERM)
        await asyncio.wait_for(came.wait(), 30)

    try:
        asyncio.run(wait())
    finally:
        signal.signal(signal.SIGTERM, before)


def test_memory_of_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = system.resident_bytes()
    with mmap.mmap(-1, 64 << 20) as held:  # new memory: what other tests have freed is resident already
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        assert system.resident_bytes() - before > 48 << 20
    monkeypatch.setattr(system, "_STATM", tmp_path / "none")
    assert system.resident_bytes() == 0
