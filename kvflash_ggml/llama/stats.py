"""`llm.kvflash`: counters of a pool, and calls that change what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..arrays import Floats
from ..constants import CHUNK
from ..logs import Progress
from ..placement.sizing import PoolSize
from ..sequence.reading import ReadStats
from ..sequence.sequence import Sequence
from ..trace.events import Observer

if TYPE_CHECKING:
    from ..calibration.finder import HeadFinder
    from ..policy.qk import QKScorer, Reason
    from ..speculation.loop import SpecStats, Speculator
    from ..trace.recorder import Summary, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStats:
    """A device that holds pooled layers. mode: how pages move, "stream", "remote", "sync" or "host". bytes: of the
    pool, and of where pages arrive and queries are kept. staging_bytes: of where pages arrive alone.
    """

    name: str
    mode: str
    layers: int
    bytes: int
    staging_bytes: int


def _live(read: Callable[[Any], Any], doc: str) -> Any:
    """Return a property of `PoolStats`. read: takes its value from the sequence, whenever somebody asks."""
    return property(lambda stats: read(stats._sequence), doc=doc)


class PoolStats:
    """Live, read-only counters of one pool, and the calls that change what it keeps."""

    def __init__(
        self,
        sequence: Sequence,
        size: PoolSize,
        finder: HeadFinder | None,
        speculator: Speculator | None,
        *,
        swa_full: bool,
    ) -> None:
        self._sequence = sequence
        self._speculator = speculator
        self._size = size
        self._finder = finder
        self._swa_full = swa_full

    def __repr__(self) -> str:
        return f"<{self.banner()}>"

    # --- the text

    n_ctx: int = _live(lambda text: text.n_ctx, "Logical context in tokens.")
    length: int = _live(lambda text: text.length, "Tokens read so far.")
    chunks: int = _live(lambda text: len(text.table.chunks), "Chunks of the text read so far.")
    resident: int = _live(lambda text: text.table.resident, "Chunks that are on the device now.")
    resident_chunks: tuple[int, ...] = _live(
        lambda text: text.table.resident_chunks, "Numbers of the chunks on the device, ascending."
    )
    epoch: int = _live(lambda text: text.table.epoch, "Changes whenever a block changes its chunk.")
    checkpoints: tuple[int, ...] = _live(
        lambda text: tuple(sorted(text.checkpoints.state())),
        "Lengths to which the text can be cut where not all memory is pooled.",
    )
    last: ReadStats = _live(
        lambda text: replace(text.stats),
        "What the newest request has lost against full attention: a copy, as it stands.",
    )
    policy: str = _live(
        lambda text: text.policy, 'Name of the policy; "none needed" if the pool holds the whole context.'
    )
    scored_every: int | None = _live(
        lambda text: None if text.scoring is None else text.scoring.selection.interval,
        "Tokens of an answer between two scorings of the chunks, at present; None if the policy does not score.",
    )
    evicted_mass: float | None = _live(
        lambda text: text.events.evicted_mass,
        """Estimated share, 0 to 1, of the attention that text outside the pool would get; None if nothing tells.

        It is of the heads that the policy asks: see `retrieval_heads`. It is the mean over the scoring passes of the
        newest answer, from its prompt's end on; heads that attend to something in particular count most. The default
        policy estimates it, from whole chunks: the chunk that is being written is left out.
        """,
    )

    # --- paging

    page_ins: int = _live(lambda text: text.paging.page_ins, "Chunks that came back from the host.")
    page_outs: int = _live(
        lambda text: text.paging.page_outs,
        "Chunks that were copied to the host: each once, when it is full. An eviction copies nothing.",
    )
    bytes_in: int = _live(
        lambda text: text.paging.page_ins * text.engine.info.page_bytes,
        "Bytes of all page-ins since the model was loaded.",
    )
    bytes_out: int = _live(
        lambda text: text.paging.page_outs * text.engine.info.page_bytes,
        "Bytes of all page-outs since the model was loaded.",
    )
    host_bytes: int = _live(lambda text: text.paging.heap.host_bytes, "Bytes of page images in host memory.")
    spilled_bytes: int = _live(lambda text: text.paging.heap.spilled_bytes, "Bytes of page images in the spill file.")

    # --- the pool

    pool: int = _live(lambda text: text.pool.n_slots, "Slots on the device, of all sequences together.")
    share: int = _live(
        lambda text: text.table.quota * CHUNK,
        "Slots that this text can have now. With several sequences it changes as requests of others begin and end.",
    )
    stateful: bool = _live(
        lambda text: text.engine.info.recurrent or text.engine.info.n_swa > 0,
        "Whether a part of the memory is not pooled (recurrent state, sliding windows): a cut needs a checkpoint.",
    )
    page_bytes: int = _live(
        lambda text: text.engine.info.page_bytes, "Bytes of one chunk's keys and values over all pooled layers."
    )
    device_bytes: int = _live(lambda text: text.engine.info.device_bytes, "Bytes of the pool on the device; constant.")
    type_k: str = _live(lambda text: text.engine.info.type_k, 'ggml\'s name of the type of K in the pool, as "f16".')
    type_v: str = _live(lambda text: text.engine.info.type_v, 'ggml\'s name of the type of V in the pool, as "f16".')
    pinned: bool = _live(lambda text: text.engine.info.pinned, "Whether page images are in page-locked memory.")
    configured_pins: tuple[tuple[int, int], ...] = _live(
        lambda text: tuple(text.config.pins), "Ranges that the configuration names."
    )

    # --- streamed steps

    reading: str = _live(
        lambda text: "exact" if text.reading.exact or not text.bounded else "pool",
        'What a token of a prompt sees of the text before it: "exact" all of it, or "pool" what is resident.',
    )
    stage: int = _live(
        lambda text: text.pool.stage_slots, "Tokens that a streamed step can see; 0 if there are no layer buffers."
    )
    stage_bytes: int = _live(lambda text: text.pool.stage_bytes, "Bytes of the layer buffers on the device; constant.")
    index_bytes: int = _live(
        lambda text: text.pool.index_bytes, "Bytes of the policy's index on a device; 0 if the host scores all."
    )
    streamed_steps: int = _live(lambda text: text.streamed_steps, "Steps that saw more of the text than was resident.")
    streamed_bytes: int = _live(
        lambda text: text.engine.streamed_bytes, "Bytes that streamed steps have copied from page images to the device."
    )

    @property
    def devices(self) -> tuple[DeviceStats, ...]:
        """The devices that hold the pool, in the order of its layers."""
        return tuple(
            DeviceStats(
                name=device.name,
                mode=device.mode,
                layers=device.layers,
                bytes=device.slot_bytes * self.pool + device.staging_bytes + device.query_bytes,
                staging_bytes=device.staging_bytes,
            )
            for device in self._sequence.engine.info.devices
        )

    @property
    def spec(self) -> SpecStats | None:
        """What drafts have won; None without speculative decoding."""
        if self._speculator is None:
            return None
        from ..speculation.loop import SpecStats  # here, as below: it is not loaded before it is asked for

        return SpecStats(self._speculator)

    @property
    def retrieval_heads(self) -> tuple[tuple[int, int], ...] | None:
        """(layer, head) pairs that the policy uses; None if it uses all heads, or none."""
        if self._finder is None or self._finder.calibration is None:
            return None
        return tuple(self._finder.calibration.chosen) or None

    def calibrate(self, progress: Progress | None = None) -> None:
        """Find the retrieval heads of the model now, unless they are known, and use them.

        progress: see `calibrated`. Nothing happens where the policy has no use for them. If they cannot be found, the
        log says why.
        """
        if self._finder is not None:
            self._finder.start(again=True)
            self._finder.wait(progress)
            self._finder.settle(self._sequence)

    def calibrated(self, progress: Progress, *, most: float | None = None) -> bool:
        """Wait for the calibration that runs behind the first answer. False if none does.

        progress(done, total) is called meanwhile with tokens. What it finds is used from the next request on. most:
        return with a warning once it is expected to take more seconds than that.
        """
        if self._finder is None or not self._finder.is_finding:
            return False
        self._finder.wait(progress, most=most)
        return True

    def pin(self, lo: int, hi: int) -> None:
        """Keep tokens [lo, hi) on the device from the next step on, bringing them back if need be."""
        self._sequence.pin_range(lo, hi)

    def watch(self, observer: Observer) -> None:
        """Call `observer.changed` for every change of what is resident. The observer takes the place of `record`."""
        self._sequence.events.observer = observer

    def explain(self, wanted: bool) -> None:
        """Record why chunks score as they do, for `reasons`, from now on, or stop. Recording makes scoring slower."""
        scorer = self._explaining
        if scorer is not None:
            scorer.explains = wanted

    @property
    def _explaining(self) -> QKScorer | None:
        """The policy, if it can tell why chunks score as they do."""
        from ..policy.qk import QKScorer  # here: another policy may be in use, or none

        scorer = None if self._sequence.scoring is None else self._sequence.scoring.scorer
        return scorer if isinstance(scorer, QKScorer) else None

    def when_full(self, give_way: Callable[[], bool]) -> None:
        """Have `give_way` called, from any thread, where host memory is at its limit and no spill folder takes more.

        give_way: frees some of it, and returns whether it could.
        """
        heap = self._sequence.paging.heap
        if heap.limit is not None:
            heap.add_reclaimer(lambda: not heap.spills and give_way())

    def reasons(self, scores: Floats) -> list[Reason]:
        """Return a `Reason` for each of the best chunks of `scores`, which an observer of `watch` was given: the array
        itself, no copy. Empty without `explain`, for older scores, and for other policies than qk.
        """
        scorer = self._explaining
        return [] if scorer is None else scorer.reasons_of(scores)

    def record(self) -> Trace:
        """Begin to record what is resident when. The trace fills while the model runs, until the next call.

        One recording at a time. `trace.write_html(path)` draws it.
        """
        from ..trace.recorder import Trace

        trace = Trace(self._summary)
        self._sequence.events.observer = trace
        if self.length:
            self._sequence.events.truncated(self.length, self.resident_chunks)
        return trace

    def _summary(self) -> Summary:
        from ..trace.recorder import Summary

        mass = self.evicted_mass
        facts = [
            ("pool", f"{self.pool:,} tokens on the device, {_mib(self.device_bytes)}"),
            ("context", f"{self.n_ctx:,} tokens"),
            ("read", f"{self.length:,} tokens in {self.chunks:,} chunks, {self.resident:,} of them resident"),
            ("policy", f"{self.policy}{self._scored()}"),
            ("recalled", f"{self.page_ins:,} chunks, {_mib(self.bytes_in)}"),
            ("copied to the host", f"{self.page_outs:,} chunks, {_mib(self.bytes_out)}"),
            ("host memory", f"{_mib(self.host_bytes)} of page images, and {_mib(self.spilled_bytes)} spilled"),
            ("attention on paged-out text", "not estimated" if mass is None else f"about {mass * 100:.0f} %"),
            ("banner", self.banner()),
        ]
        return Summary(facts=facts)

    def unpin(self) -> None:
        """Unpin every token, those of the configuration too."""
        self._sequence.table.unpin_all()

    def banner(self) -> str:
        """Return one line that says what runs."""
        info = self._sequence.engine.info
        most = info.page_bytes * -(-self.n_ctx // CHUNK) if self._sequence.bounded else 0
        types = info.type_k if info.type_v in (info.type_k, "") else f"{info.type_k}/{info.type_v}"
        return (
            f"kvflash: pool {self.pool} of {self._contexts()} tokens ({self._size.why}{self._shares()}), "
            f"{self.device_bytes / 2**20:.1f} MiB on {self._where()}, up to {most / 2**20:.0f} MiB on the host"
            f"{' (page-locked)' if info.pinned else ''}, KV {types}, "
            f"{self._reading()}{self._drafts()}, policy {self.policy}{self._index()}{self._scored()}, "
            f"{info.n_layers} layers pooled{self._windows()}"
        )

    def _contexts(self) -> str:
        count = self._size.parallel
        return f"{count} x {self.n_ctx}" if count > 1 else str(self.n_ctx)

    def _shares(self) -> str:
        count, least = self._size.parallel, self._sequence.pool.share
        if count == 1:
            return f", one answer at a time: {self._size.alone}" if self._size.alone else ""
        more = ", and more while others are idle" if self._sequence.config.is_elastic and least < self.n_ctx else ""
        return f", for {count} sequences: {least} for each{more}"

    def _where(self) -> str:
        devices = self.devices
        return " and ".join(f"{x.name}{_told(x, among=len(devices))}" for x in devices)

    def _reading(self) -> str:
        reading, stage = self._sequence.reading, self.stage
        if not self._sequence.bounded:
            return "reading exact"
        if not reading.exact:
            return f"reading by the pool ({reading.why})"
        size = f"{stage} tokens in view: {reading.why}, {self.stage_bytes / 2**20:.1f} MiB"
        if self._sequence.config.reading == "preview":
            return f"answering long prompts from a part of them, then reading exact ({size})"
        if reading.answers_exactly and self._sequence.config.answer == "auto":
            return f"reading exact, and the whole text checks answers ({size})"
        return f"reading {'and answering ' if reading.answers_exactly else ''}exact ({size})"

    def _drafts(self) -> str:
        if self._speculator is None:
            return ""
        lone = ", ".join(one.drafter.name for one in self._speculator.active if one.lone)
        when = f" ({lone} while one text is decoded alone)" if lone else ""
        return f", drafts by {', '.join(self._speculator.types)}{when}"

    def _windows(self) -> str:
        window = self._sequence.engine.info.n_swa
        if window == 0:
            return ""
        kept = f"all {self.n_ctx}" if self._swa_full else f"the last {window}"
        return f", sliding-window layers keep {kept} tokens (swa_full={self._swa_full})"

    def _index(self) -> str:
        scoring = self._sequence.scoring
        size = 0 if scoring is None else scoring.scorer.index_bytes
        if not size:
            return ""
        there = self._sequence.pool.index_room(0).size
        where = "" if not there else " on the GPU" if there >= size else f", {_mib(there)} of it on the GPU"
        return f" ({self._heads}{size / 2**20:.1f} MiB of index{where})"

    def _scored(self) -> str:
        every = self.scored_every
        return "" if every is None else ", scored at every token" if every == 1 else f", scored every {every} tokens"

    @property
    def _heads(self) -> str:
        """Which heads the policy asks, for the banner; empty where it cannot choose."""
        if self._finder is None:
            return ""
        if self._finder.calibration is None:
            how = "being found" if self._finder.is_finding else "found behind an answer, or by 'kvflash-run calibrate'"
            return f"all heads until those that retrieve are {how}, "
        count = len(self._finder.calibration.chosen)
        return f"{count} retrieval head{'' if count == 1 else 's'}, " if count else "all heads, as none retrieves, "


def _told(device: DeviceStats, *, among: int) -> str:
    told = [f"{device.layers} layers"] if among > 1 else []
    told += ["pages wait for its compute"] if device.mode == "sync" else []
    return f" ({', '.join(told)})" if told else ""


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
