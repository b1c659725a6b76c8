"""A store in an object store: S3 of `moto`, on loopback, behind a proxy that lets requests fail."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support.fake_model import FakeModel
from support.flaky_proxy import FAULTS, FlakyProxy
from support.served import answer

from kvflash_fleet import open_store, takeover
from kvflash_fleet.objects import Objects, open_objects
from kvflash_fleet.shared import SharedTexts, begin_of
from kvflash_ggml.batching.scheduler import Scheduler
from kvflash_ggml.cli.main import main

pytest.importorskip("s3fs", reason="kvflash-fleet's extra 's3' is not installed")
moto = pytest.importorskip("moto.server", reason="moto[server], an S3 server for tests, is not installed")

MODEL = "0123456789abcdef" * 2
TEXT = np.arange(600, dtype=np.int32) % 90 + 33


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def proxy(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlakyProxy]:
    import s3fs

    one = FlakyProxy(s3_port, seed=1)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{one.port}", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield one
    one.close()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def url(proxy: FlakyProxy) -> str:
    import s3fs

    bucket = f"texts-{uuid.uuid4().hex}"
    s3fs.S3FileSystem().mkdir(bucket)
    return f"s3://{bucket}/all"


@pytest.fixture
def server(url: str) -> Iterator[Callable[[], Scheduler]]:
    made: list[Scheduler] = []

    def start() -> Scheduler:
        made.append(Scheduler(FakeModel(), shared=open_store(f"{url}/{MODEL}", made="", bandwidth=0)))
        made[-1].start()
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_objects(url: str) -> None:
    objects: Objects = open_objects(url, write=True)
    with pytest.raises(FileNotFoundError):
        objects.get("a/b")
    assert objects.list("a") == []
    objects.delete("a/b")
    assert objects.create("a/b", b"one")
    assert objects.create("a/b", b"one"), "repeated by a client that did not hear the answer"
    assert not objects.create("a/b", b"two")
    objects.put("c/d", b"three")
    objects.put("c/d", b"three")
    objects.put("c/e", b"")
    assert (objects.get("a/b"), objects.get("c/d"), objects.get("c/e")) == (b"one", b"three", b"")
    (one,) = objects.list("a")
    assert (one.name, one.size) == ("a/b", 3)
    assert one.modified > 1e9
    objects.delete("a/b")
    assert objects.list("a") == []


def written(scheduler: Scheduler, count: int) -> None:
    """Let the server write what it was offered, so many states or more."""
    scheduler.call(lambda: [scheduler.shared._finish(one) for one in list(scheduler.shared._writing)]).result(60)  # type: ignore[union-attr]
    assert scheduler.swapped.counts.written >= count


def test_another_server_goes_on(server: Callable[[], Scheduler], url: str) -> None:
    one, other = server(), server()
    tokens = TEXT.tolist()
    for turn, here in enumerate((one, other, one), 1):
        end = answer(here, tokens, 20)
        assert end.usage.cached == (0 if turn == 1 else len(tokens) - 10), turn
        written(here, -(-turn // 2))
        tokens = [*tokens, *end.tokens, *TEXT[:10].tolist()]
    assert one.swapped.counts.copied == 0
    assert "1 conversations" in CliRunner().invoke(main, ["store", "ls", url]).output
    assert CliRunner().invoke(main, ["store", "verify", url]).exit_code == 0
    CliRunner().invoke(main, ["store", "prune", url, "--older-than", "0"])
    assert CliRunner().invoke(main, ["store", "ls", url, "--json"]).stdout == "[]\n"


def test_requests_that_fail(
    server: Callable[[], Scheduler], proxy: FlakyProxy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers never fail, no text is a mixture, and what was written last is taken over once the store works."""
    monkeypatch.setattr(takeover, "REST_S", 0.0)
    servers, draw = [server(), server()], random.Random(1)
    talks = [[*b"%d" % n, *TEXT.tolist()] for n in range(3)]
    proxy.share = 0.2
    for _ in range(12):
        tokens = draw.choice(talks)
        end = answer(draw.choice(servers), tokens, 20)
        assert end.reason == "stop"
        tokens += [*end.tokens, *TEXT[: draw.randrange(1, 90)].tolist()]
    proxy.share = 0.0
    assert all(proxy.happened[fault] for fault in FAULTS), proxy.happened
    for tokens in talks:
        end = answer(servers[0], tokens, 20)
        written(servers[0], 1)
        tokens += end.tokens
        assert answer(servers[1], [*tokens, 65], 20).usage.cached == len(tokens)
        written(servers[1], 1)
    texts = SharedTexts(open_objects(f"{url}/{MODEL}", write=False))
    for tokens in talks:
        begin = begin_of(np.asarray(tokens, np.int32), "")
        heads = [texts.read(begin, *state) for state in texts.latest(begin).items()]
        assert len(heads) >= 1
        for head in heads:
            texts.fetch(head, tmp_path / "in")
            assert (tmp_path / "in").read_bytes() == head.tokens.tobytes()
