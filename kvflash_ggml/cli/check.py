"""`kvflash-run check MODEL`: what a pool gives with this model on this machine, beside the full cache."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from .. import notation, system
from ..calibration.known import heads_file, of_llama
from ..config import KVFlashConfig
from ..constants import POOL_STEP, round_up
from ..errors import KVFlashError
from ..files import check_writable
from . import checking, model
from .checking import QUESTIONS, ROOM, Arm
from .model import log_to_stderr, offloading, plain_errors
from .options import DeviceOptions, LogOptions, WeightOptions, device_options, log_options, weight_options
from .report import say, version_line
from .sections import HELP, MODEL_FILE, SectionCommand, Written, option
from .terminal import Progress, note, size_text, stderr_is_terminal, time_text

_check = option("Check")

LEAST = 4
"""Questions that are asked whatever the time."""

POOL_SHARE, POOL_MOST = 8, 4096
"""Unless it is given, the pool has an eighth of the text's tokens, and at most so many."""

KNOWS = 0.5
"""Share of the questions that the full cache must answer for its agreement with a pool to say much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What came of it. length: tokens of the text. driver: memory is told by the driver of a GPU. model: its title.

    apart: the largest difference between logits after exact reading and those of the full cache. alike: depths at which
    both have the same likeliest token. seconds: of all.
    """

    model: str
    length: int
    full: Arm
    pooled: Arm
    driver: bool
    apart: float
    alike: int
    seconds: float

    @property
    def same(self) -> int:
        """Questions on which both are right, or both wrong."""
        return sum(a == b for a, b in zip(self.full.right, self.pooled.right, strict=True))

    @property
    def faster(self) -> float:
        """Speed of answers from the pool at the last depth, against the full cache."""
        return self.pooled.speeds[-1].decode / self.full.speeds[-1].decode

    def sentence(self) -> str:
        known, also = sum(self.full.right), sum(self.pooled.right)
        return (
            f"This pool of {self.pooled.pool:,} tokens answers as the full cache on {self.same} of "
            f"{len(self.full.right)} questions ({also} right, {known} by the full cache); "
            f"at {self.length:,} tokens it decodes {self.faster:.1f} times as fast."
        )

    def remarks(self) -> list[str]:
        """Sentences that a reader of the first one needs."""
        known, asked = sum(self.full.right), len(self.full.right)
        out = []
        if known < KNOWS * asked:
            out.append(
                f"The full cache itself answers {known} of {asked}: this model says little about a pool at this length."
                " A larger model says more."
            )
        if self.apart:
            out.append(
                "Logits differ where a small pool reads in shorter steps than the full cache, which round otherwise: "
                "docs/exact-reading.md, 'Bitwise or not'."
            )
        if asked < QUESTIONS:
            out.append(f"The time was enough for {asked} of {QUESTIONS} questions: give more --minutes.")
        return out

    def rows(self) -> list[tuple[str, str, str]]:
        """Rows of a table: what, of the full cache, of the pool."""
        found = []
        for full, pooled in zip(self.full.speeds, self.pooled.speeds, strict=True):
            found.append((f"reading to {full.depth:,} tokens (tok/s)", f"{full.read:,.0f}", f"{pooled.read:,.0f}"))
            found.append((f"answer at {full.depth:,} tokens (tok/s)", f"{full.decode:,.1f}", f"{pooled.decode:,.1f}"))
        where = "device memory" if self.driver else "memory of the process"
        found.append((where, size_text(self.full.memory), size_text(self.pooled.memory)))
        found.append(("page images in host memory", "-", size_text(self.pooled.pages)))
        known, also = (str(sum(arm.right)) for arm in (self.full, self.pooled))
        found.append((f"right of {len(self.full.right)} questions", known, also))
        exact = "the same bits"
        if self.apart:
            exact = f"{self.apart:.2g} apart at most; same next token {self.alike} of {len(self.full.logits)} times"
        found.append(("logits after exact reading", "-", exact))
        return found

    def document(self) -> dict[str, Any]:
        """Return all figures for programs."""
        arms = {
            name: {key: value for key, value in asdict(arm).items() if key != "logits"}
            for name, arm in (("full", self.full), ("pool", self.pooled))
        }
        more = {"same": self.same, "faster": self.faster, "sentence": self.sentence(), "remarks": self.remarks()}
        return {
            "model": self.model, "length": self.length, "apart": self.apart, "alike": self.alike, "driver": self.driver,
            "seconds": round(self.seconds, 1), **arms, **more,
        }  # fmt: skip


def lines(found: Finding) -> list[str]:
    """Return the finding for a terminal."""
    rows = [("", "full cache", f"pool of {found.pooled.pool:,}"), *found.rows()]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    table = [f"{a:{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows]
    return [*table, "", found.sentence(), *found.remarks()]


def markdown(found: Finding, machine: Sequence[str]) -> str:
    """Return the finding as a report. machine: lines about it; neither names nor paths of it are in them."""
    rows = [("", "full cache", f"pool of {found.pooled.pool:,}"), ("---", "---", "---"), *found.rows()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    about = "\n".join(f"- {line}" for line in (found.model, *machine))
    said = " ".join([found.sentence(), *found.remarks()])
    return f"### kvflash-run check\n\n{said}\n\n{table}\n\n{about}\n"


# --- the command


@click.command(cls=SectionCommand, context_settings=HELP | {"auto_envvar_prefix": "KVFLASH"})
@click.argument("model", type=MODEL_FILE, metavar="MODEL")
@_check(
    "--kvflash",
    "pool",
    type=Written(notation.size),
    allow_from_autoenv=False,
    metavar="TOKENS",
    help=f"The pool.  [default: an eighth of the text, {POOL_MOST} at most]",
)
@_check(
    "--minutes",
    type=click.FloatRange(min=0.1),
    default=5.0,
    show_default=True,
    allow_from_autoenv=False,
    metavar="N",
    help="How long it may take, roughly: the text is as long as that allows.",
)
@_check(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    allow_from_autoenv=False,
    metavar="FILE",
    help="Also write it as Markdown, without names or paths of this machine.",
)
@_check("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@weight_options
@device_options
@log_options
def check(
    *, model: str, pool: int | None, minutes: float, report: Path | None, as_json: bool, loading: WeightOptions,
    devices: DeviceOptions, log: LogOptions,
) -> None:  # fmt: skip
    """Say what a pool gives with this model on this machine.

    \b
    The full cache and a pool read the same text exactly, answer at a quarter, a half and all
    of it, and are asked 24 questions about twelve facts in it. Speeds, memory and right answers
    are compared, and one sentence says what came of it.
    """
    log_to_stderr(log)
    with plain_errors(verbose=log.verbose):
        if report is not None:
            check_writable(report)
        settings = offloading(loading, devices) | loading.settings() | devices.settings() | {"verbose": log.verbose}
        found, machine = Comparison(model, settings, seconds=60 * minutes, quiet=log.quiet).run(pool)
        if report is not None:
            report.write_text(markdown(found, machine), encoding="utf-8")
    say(lines(found), found.document() | {"machine": machine}, as_json=as_json, indent=2)


class Comparison:
    """Opens a model in turns without and with a pool. settings: of `Llama`, but for the context and the pool."""

    def __init__(self, path: str, settings: Mapping[str, Any], *, seconds: float, quiet: bool) -> None:
        self._path, self._settings, self._quiet = path, settings, quiet
        self._seconds, self._began = seconds, time.perf_counter()
        self._free: dict[str, int] = {}
        self._resident = 0

    def run(self, pool: int | None) -> tuple[Finding, list[str]]:
        """Return what came of it, and lines about the machine. pool: tokens, None for a part of the text.

        KVFlashError if the model cannot have a pool, or the machine cannot hold its shortest context.
        """
        import llama_cpp  # here: it loads the library

        with self._open(checking.PROBE + ROOM, kvflash=KVFlashConfig(pool=2048, calibrate=False)) as llm:
            title, heads = of_llama(llm).title, heads_file(of_llama(llm).identity)
            pace, most = checking.pace_of(llm), llama_cpp.llama_model_n_ctx_train(llm.model)
        left = self._seconds - self._gone()
        tries = checking.lengths(pace, left, most=most, calibrates=not heads.exists())
        about = self._gone() + pace.seconds(tries[0], calibrates=not heads.exists())
        self._say(f"the full cache, then a pool, read {tries[0]:,} tokens and answer: about {time_text(about)} minutes")
        full, driver = self._first_that_fits(tries)
        (length, arm) = full
        tokens = round_up(pool or max(KVFlashConfig().minimum_pool, min(POOL_MOST, length // POOL_SHARE)), POOL_STEP)
        asked = len(arm.right)
        with self._open(length + ROOM, kvflash=KVFlashConfig(pool=tokens, reading="exact")) as llm:
            self._say(f"a pool of {tokens:,} tokens")
            shown = stderr_is_terminal() and not self._quiet
            with Progress(shown=shown, doing="finding the heads of this model that retrieve, once") as progress:
                llm.kvflash.calibrate(progress.update)
            pooled = checking.measure(
                llm, checking.compose(llm, length), length, more=lambda done: done < asked, taken=self._taken(driver)
            )
        both = list(zip(arm.logits, pooled.logits, strict=True))
        found = Finding(
            model=title, length=arm.speeds[-1].depth, full=arm, pooled=pooled, driver=driver,
            apart=max(float(abs(a - b).max()) for a, b in both),
            alike=sum(int(a.argmax() == b.argmax()) for a, b in both), seconds=self._gone(),
        )  # fmt: skip
        return found, self._machine()

    def _first_that_fits(self, tries: Sequence[int]) -> tuple[tuple[int, Arm], bool]:
        """Measure the full cache with the longest text that this machine can hold; does its driver tell the memory?"""
        for length in tries:
            try:
                with self._open(length + ROOM, kvflash=None) as llm:
                    self._say(f"the full cache, {length:,} tokens")
                    driver = self._taken(True)() > 0
                    half = self._gone() + (self._seconds - self._gone()) / 2
                    arm = checking.measure(
                        llm, checking.compose(llm, length), length, more=partial(self._before, half),
                        taken=self._taken(driver),
                    )  # fmt: skip
                    return (length, arm), driver
            except (KVFlashError, ValueError, MemoryError) as error:
                if length == tries[-1]:
                    raise
                self._say(f"{length:,} tokens are too many for the full cache: {error}")
        raise AssertionError("there is always one to try")

    @contextmanager
    def _open(self, n_ctx: int, **settings: Any) -> Iterator[Any]:
        from ..placement import memory

        self._free = {device.name: device.free for device in memory.devices() if device.kind != "host"}
        self._resident = system.resident_bytes()
        given = {"flash_attn": True, "swa_full": False, **self._settings, **settings}  # of the full cache as of a pool
        with closing(model.create_llama(model_path=self._path, n_ctx=n_ctx, **given)) as llm:
            llm.kvflash_progress = lambda done, total: None  # or it tells programs how to follow a long prompt
            yield llm

    def _taken(self, driver: bool) -> Callable[[], int]:
        """Return a function that says how many bytes were taken since the model was opened."""
        from ..placement import memory

        def of_devices() -> int:
            now = {device.name: device.free for device in memory.devices()}
            return sum(max(0, free - now[name]) for name, free in self._free.items())

        return of_devices if driver else lambda: max(0, system.resident_bytes() - self._resident)

    def _before(self, end: float, asked: int) -> bool:
        return asked < LEAST or self._gone() < end

    def _gone(self) -> float:
        return time.perf_counter() - self._began

    def _say(self, text: str) -> None:
        if not self._quiet:
            note(f"kvflash: {text}")

    def _machine(self) -> list[str]:
        """Return lines about what it ran on: neither names nor paths."""
        from ..placement import memory

        kinds = [one.description or one.kind for one in memory.devices() if one.kind != "host"]
        cores = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
        return [version_line(), ", ".join([cores, *kinds])]
