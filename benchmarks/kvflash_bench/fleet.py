"""Conversations on several servers that share a store: a router asks any of them, and some of them end meanwhile."""

from __future__ import annotations

import contextlib
import http.client
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvflash_ggml.errors import KVFlashError

from .serving import Conversation
from .sockets import Server, served

GREEDY = {"temperature": 0, "ignore_eos": True, "return_tokens": True}

TRIES = 20
"""A turn is asked so often at most: each time, a server may have ended."""


@dataclass(eq=False)
class Member:
    """A place of the fleet. server: None while another one starts there."""

    server: Server | None = None
    stack: ExitStack = field(default_factory=ExitStack)
    changing: threading.Lock = field(default_factory=threading.Lock)


class Fleet:
    """So many servers of a model, with these options of `kvflash-run serve`. Use it in a `with`."""

    def __init__(self, model: str, options: Sequence[str], count: int) -> None:
        self._model = model
        self._options = options
        self.members = [Member() for _ in range(count)]

    def __enter__(self) -> Fleet:
        try:
            for member in self.members:
                self._start(member)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.stack.close()

    def _start(self, member: Member) -> None:
        member.server = member.stack.enter_context(served(self._model, self._options))

    def end(self, member: Member, number: signal.Signals) -> None:
        """End a server by a signal, wait until it has, and start another in its place."""
        with member.changing:
            assert member.server is not None
            member.server.process.send_signal(number)
            member.server.process.wait()  # until then it is asked like any other: a router does not know yet
            member.server = None
            member.stack.close()
            self._start(member)


class Player:
    """Asks for the turns of conversations, each at a server that the dice choose. Several threads use it.

    first_s, moved_s: seconds of whole answers to first prompts, and to those that took a text over.
    """

    def __init__(self, fleet: Fleet, *, most: int, seed: int) -> None:
        self._fleet = fleet
        self._most = most
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        self._where: dict[Conversation, Member] = {}
        self.counts = Counter[str]()
        self.first_s: list[float] = []
        self.moved_s: list[float] = []

    def turn(self, one: Conversation) -> None:
        """Ask for the next turn, again where a server has ended meanwhile. KVFlashError if nobody answers."""
        asked = {"prompt": one.prompt, "n_predict": self._most, **GREEDY}
        for _ in range(TRIES):
            with self._lock:
                member = self._dice.choice(self._fleet.members)
            server = member.server
            if server is None:
                with member.changing:  # as a router waits that has nobody else
                    continue
            began = time.monotonic()
            try:
                reply = server.ask("/completion", asked)
            except ConnectionRefusedError:
                self.count(elsewhere=1)
                continue
            except (OSError, http.client.HTTPException, ValueError):  # it was killed at any place of its reply
                self.count(failed=1)
                continue
            if reply.status == 503:
                self.count(elsewhere=1)
                continue
            if reply.status != 200:
                raise KVFlashError(f"a server answers {reply.status}: {reply.body}")
            self._note(one, member, reply.body, time.monotonic() - began)
            return
        raise KVFlashError(f"no server has answered in {TRIES} attempts")

    def _note(self, one: Conversation, member: Member, body: dict[str, Any], took_s: float) -> None:
        timings = body["timings"]
        moved = bool(one.answers) and self._where.get(one) is not member
        said = len(one.said[len(one.answers)])
        reread = bool(one.answers) and timings["prompt_n"] > said + 1  # the last token of an answer is read with it
        if reread and one.exact is None:
            one.exact = len(one.answers)
        self.count(requests=1, moved=moved, read=timings["prompt_n"], said=said, reread=reread)
        if not one.answers:
            self.first_s.append(took_s)
        elif moved and timings["cache_n"]:
            self.moved_s.append(took_s)
        self._where[one] = member
        one.answers.append(tuple(body["tokens"]))

    def count(self, **more: int) -> None:
        """Add to what has happened, by name."""
        with self._lock:
            self.counts.update(more)


def play(
    model: str, order: Sequence[Conversation], *, options: Sequence[str], servers: int, folder: Path, most: int,
    kill_every: int, end_every: int, seed: int, tell: Callable[[dict[str, float]], None],
) -> dict[str, Any]:  # fmt: skip
    """A turn of each in this order, as many at once as there are servers. What came of it.

    kill_every, end_every: turns after which a server is killed, or told to end; 0 for never. Another one starts in its
    place. read, said: tokens of prompts that were read, and that the turns have added. reread: turns that read
    more than they have added.
    """
    dice, left, busy = random.Random(seed), list(order), set[Conversation]()
    lock, errors, begun = threading.Lock(), list[BaseException](), 0
    with Fleet(model, [*options, "--store", str(folder / "store")], servers) as fleet:
        player = Player(fleet, most=most, seed=seed)

        def take() -> tuple[Conversation | None, signal.Signals | None]:
            nonlocal begun
            with lock:
                one = next((one for one in left if one not in busy), None)
                if one is None:
                    return None, None
                left.remove(one)
                busy.add(one)
                begun += 1
                number = None
                if kill_every and begun % kill_every == 0:
                    number = signal.SIGKILL
                elif end_every and begun % end_every == 0:
                    number = signal.SIGTERM
                return one, number

        def client() -> None:
            while not errors:
                one, number = take()
                if one is None:
                    return
                try:
                    if number is not None:
                        member = dice.choice(fleet.members)
                        fleet.end(member, number)
                        player.count(**{"killed" if number is signal.SIGKILL else "ended": 1})
                    player.turn(one)
                except BaseException as err:
                    errors.append(err)
                with lock:
                    busy.discard(one)
                tell({"turns": float(player.counts["requests"]), "of": float(len(order))})

        threads = [threading.Thread(target=client) for _ in range(servers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        counts, metrics = player.counts, Counter[str]()
        for member in fleet.members:
            with contextlib.suppress(OSError):
                assert member.server is not None
                found = member.server.metrics()
                metrics.update({
                    name: int(found[f"{name}_total"])
                    for name in ("store_writes", "store_takeovers", "store_copies", "conversations_lost")
                })  # fmt: skip
    names = ("requests", "moved", "reread", "killed", "ended", "failed", "elsewhere", "read", "said")
    return {
        "servers": servers, "begun": len({*order}), **{name: counts[name] for name in names},
        "read_ratio": counts["read"] / max(1, counts["said"]),
        "first_s": statistics.median(player.first_s or [0.0]), "moved_s": statistics.median(player.moved_s or [0.0]),
        **metrics,
    }  # fmt: skip
