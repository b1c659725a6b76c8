"""Several processes on one folder, some of them killed, with less room than they want."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.prefix_texts import Int32s, load, make_heap, make_tier, put, text

import kvflash_ggml
from kvflash_ggml.errors import SnapshotError

ROUNDS = 60
TESTS = Path(__file__).parents[1]


def work(folder: Path, seed: int, capacity: int, rounds: int) -> int:
    """Store and load random texts. Whatever is loaded is checked to the last byte; returns how many were found."""
    rng = random.Random(seed)
    heap = make_heap()
    stateful = bool(seed % 2)
    tier = make_tier(folder, heap, capacity=capacity, model="ab"[seed % 2], stateful=stateful)
    found = 0
    for _ in range(rounds):
        parts = [(rng.randrange(3), rng.choice([64, 100, 300]))] * 2 + [(rng.randrange(6), rng.randrange(1, 200))]
        tokens = text(*parts)
        put(tier, heap, tokens, stateful=stateful)
        wanted = text(*parts[: rng.randrange(1, 4)])
        hit = tier.find(wanted)
        try:
            found += load(tier, wanted, stateful=stateful) > 0
        except SnapshotError as err:
            if "cannot open" not in str(err):  # another process has evicted it meanwhile
                raise
            tier.discard(hit)
    assert heap.host_bytes == 0
    return found


def start(*arguments: object) -> subprocess.Popen[str]:
    package = Path(kvflash_ggml.__file__).parents[1]
    return subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (package, TESTS)))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [60_000, 1 << 30])
def test_processes_share_a_folder(tmp_path: Path, capacity: int) -> None:
    workers = [start(tmp_path, capacity, seed, ROUNDS) for seed in range(4)]
    victim = start(tmp_path, capacity, 4, 1_000_000)
    while len(list(tmp_path.glob("*/*.tail"))) < 5 and victim.poll() is None:
        time.sleep(0.01)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL, victim.communicate()[0]
    victim.communicate()
    outputs = [worker.communicate()[0] for worker in workers]
    for worker, output in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, output
        assert "deleted" not in output, "a sound file was taken for a damaged one"
        assert int(output.splitlines()[-1]) > 0, "nothing was ever found"

    # what they have left is sound, and whoever comes next can go on
    heap = make_heap()
    tier = make_tier(tmp_path, heap, capacity=capacity, model="a")
    put(tier, heap, text((1, 300)))
    total = sum(path.stat().st_size for path in tmp_path.glob("*/*-*"))
    assert total <= capacity
    for first in range(3):
        for length in (64, 100, 300):
            known = load(tier, text((first, length), (first, length)))
            assert known or capacity < 1 << 30


@pytest.mark.slow
def test_nothing_is_lost_while_there_is_room(tmp_path: Path) -> None:
    """Two processes write the same texts at the same time; afterwards each of them is there."""
    workers = [start(tmp_path, 1 << 30, seed, "common") for seed in (0, 2, 4)]
    for worker in workers:
        output = worker.communicate()[0]
        assert worker.returncode == 0, output
    heap = make_heap()
    tier = make_tier(tmp_path, heap, model="a")
    for tokens in common_texts():
        assert load(tier, tokens) == len(tokens)


def common_texts() -> list[Int32s]:
    return [text((1, 320), (seed, 64 * seed)) for seed in range(2, 8)] + [text((1, 64 * n)) for n in range(1, 12)]


if __name__ == "__main__":
    folder, capacity, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    if sys.argv[4] == "common":
        heap = make_heap()
        tier = make_tier(folder, heap, capacity=capacity, model="a")
        texts = common_texts()
        random.Random(seed).shuffle(texts)
        for tokens in texts:
            put(tier, heap, tokens)
    else:
        print(work(folder, seed, capacity, int(sys.argv[4])))
