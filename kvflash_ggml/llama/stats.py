"""`llm.kvflash`: what a running pool looks like from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..arrays import Floats
from ..calibration.finder import HeadFinder
from ..constants import CHUNK
from ..logs import Progress
from ..placement.sizing import PoolSize
from ..policy.qk import QKScorer, Reason
from ..sequence.reading import ReadStats
from ..sequence.sequence import Sequence
from ..spec.loop import SpecStats, Speculator
from ..trace.events import Observer
from ..trace.recorder import Summary, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStats:
    """A device that holds pooled layers. mode: how pages move, "stream", "remote", "sync" or "host". bytes: of the
    pool, and of where pages arrive and queries are kept.
    """

    name: str
    mode: str
    layers: int
    bytes: int


class PoolStats:
    """Live, read-only counters of one pool, and the calls that change what it keeps."""

    def __init__(
        self,
        session: Sequence,
        size: PoolSize,
        finder: HeadFinder | None,
        speculator: Speculator | None,
        *,
        swa_full: bool,
    ) -> None:
        self._session = session
        self._speculator = speculator
        self._size = size
        self._finder = finder
        self._swa_full = swa_full

    def __repr__(self) -> str:
        return f"<{self.banner()}>"

    @property
    def pool(self) -> int:
        """Slots on the device that this text can have."""
        return self._session.pool.share

    @property
    def n_ctx(self) -> int:
        """Logical context in tokens."""
        return self._session.n_ctx

    @property
    def length(self) -> int:
        """Tokens read so far."""
        return self._session.length

    @property
    def chunks(self) -> int:
        """Chunks of the text read so far."""
        return len(self._session.table.chunks)

    @property
    def resident(self) -> int:
        """Chunks that are on the device now."""
        return self._session.table.resident

    @property
    def resident_chunks(self) -> tuple[int, ...]:
        """Their numbers, ascending."""
        return self._session.table.resident_chunks

    @property
    def stateful(self) -> bool:
        """Is there memory that is not pooled (recurrent state, sliding windows), so that a cut needs a checkpoint?"""
        info = self._session.engine.info
        return info.recurrent or info.n_swa > 0

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Lengths to which the text can be cut where not all memory is pooled."""
        return tuple(sorted(self._session.checkpoints.state()))

    @property
    def page_ins(self) -> int:
        """Chunks that came back from the host."""
        return self._session.paging.page_ins

    @property
    def page_outs(self) -> int:
        """Chunks that were copied to the host: each once, when it is full. An eviction copies nothing."""
        return self._session.paging.page_outs

    @property
    def bytes_in(self) -> int:
        """Bytes of all page-ins since the model was loaded."""
        return self.page_ins * self.page_bytes

    @property
    def bytes_out(self) -> int:
        """Bytes of all page-outs since the model was loaded."""
        return self.page_outs * self.page_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one chunk's keys and values over all pooled layers."""
        return self._session.engine.info.page_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of page images in host memory."""
        return self._session.paging.heap.host_bytes

    @property
    def spilled_bytes(self) -> int:
        """Bytes of page images in the spill file."""
        return self._session.paging.heap.spilled_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of the pool on the device; constant."""
        return self._session.engine.info.device_bytes

    @property
    def devices(self) -> tuple[DeviceStats, ...]:
        """The devices that hold the pool, in the order of its layers."""
        return tuple(
            DeviceStats(
                name=device.name,
                mode=device.mode,
                layers=device.layers,
                bytes=device.slot_bytes * self.pool + device.staging_bytes + device.query_bytes,
            )
            for device in self._session.engine.info.devices
        )

    @property
    def reading(self) -> str:
        """What a token of a prompt sees of the text before it: "exact" all of it, or "pool" what is resident."""
        return "exact" if self._session.reading.exact or not self._session.bounded else "pool"

    @property
    def stage(self) -> int:
        """Tokens that a streamed step can see; 0 if there are no stages."""
        return self._session.pool.stage_slots

    @property
    def stage_bytes(self) -> int:
        """Bytes of the stages on the device; constant."""
        return self._session.pool.stage_bytes

    @property
    def streamed_steps(self) -> int:
        """Steps that saw more of the text than was resident."""
        return self._session.streamed_steps

    @property
    def streamed_bytes(self) -> int:
        """Bytes that they have copied from page images to the device."""
        return self._session.engine.streamed_bytes

    @property
    def last(self) -> ReadStats:
        """What the newest request has lost against full attention: a copy, as it stands."""
        return replace(self._session.stats)

    @property
    def spec(self) -> SpecStats | None:
        """What drafts have won; None without speculative decoding."""
        return None if self._speculator is None else SpecStats(self._speculator)

    @property
    def policy(self) -> str:
        """Who stays resident; "none needed" if the pool holds the whole context."""
        return self._session.policy

    @property
    def retrieval_heads(self) -> tuple[tuple[int, int], ...] | None:
        """(layer, head) of those that the policy asks; None if it asks all, or none."""
        if self._finder is None or self._finder.calibration is None:
            return None
        return tuple(self._finder.calibration.chosen) or None

    def calibrate(self, progress: Progress | None = None) -> None:
        """Find the retrieval heads of the model now, unless they are known, and use them. As `calibrated` otherwise.

        Nothing happens where the policy has no use for them. If they cannot be found, the log says why.
        """
        if self._finder is not None:
            self._finder.start(again=True)
            self._finder.wait(progress)
            self._finder.settle(self._session)

    def calibrated(self, progress: Progress, *, most: float | None = None) -> bool:
        """Wait for the calibration that runs behind the first answer. False if none does.

        progress(done, total) is called meanwhile with tokens. What it finds is used from the next request on. most:
        return with a warning once it is expected to take more seconds than that.
        """
        if self._finder is None or not self._finder.is_finding:
            return False
        self._finder.wait(progress, most=most)
        return True

    @property
    def evicted_mass(self) -> float | None:
        """Estimated share, 0 to 1, of the attention that text outside the pool would get; None if nothing tells.

        Of the heads that the policy asks: see `retrieval_heads`.

        Mean over the looks of the newest answer, from its prompt's end on, where heads that look at something in
        particular count most. Estimated by the default policy, from whole chunks: what is being written is left out.
        """
        return self._session.events.evicted_mass

    @property
    def epoch(self) -> int:
        """Changes whenever a block changes its chunk."""
        return self._session.table.epoch

    @property
    def type_k(self) -> str:
        """ggml's name of the type of K in the pool, as "f16"."""
        return self._session.engine.info.type_k

    @property
    def type_v(self) -> str:
        """ggml's name of the type of V in the pool, as "f16"."""
        return self._session.engine.info.type_v

    @property
    def pinned(self) -> bool:
        """Are page images in page-locked memory?"""
        return self._session.engine.info.pinned

    def pin(self, lo: int, hi: int) -> None:
        """Keep tokens [lo, hi) on the device from the next step on, bringing them back if need be."""
        self._session.pin_range(lo, hi)

    def watch(self, observer: Observer) -> None:
        """Tell an observer of every change of what is resident, in place of one that records."""
        self._session.events.observer = observer

    def explain(self, wanted: bool) -> None:
        """Keep from now on why chunks score as they do, for `reasons`, or no longer: a look takes a little longer."""
        scorer = None if self._session.scoring is None else self._session.scoring.scorer
        if isinstance(scorer, QKScorer):
            scorer.explains = wanted

    def when_full(self, give_way: Callable[[], bool]) -> None:
        """Call this, from any thread, where host memory is at its limit, and no spill folder takes what leaves it.

        It lets something go, or is False.
        """
        heap = self._session.paging.heap
        if heap.limit is not None:
            heap.add_reclaimer(lambda: not heap.spills and give_way())

    def reasons(self, scores: Floats) -> list[Reason]:
        """Why the chunks at the top of a look's scores are there; nothing if the policy cannot tell."""
        scorer = None if self._session.scoring is None else self._session.scoring.scorer
        return scorer.reasons_of(scores) if isinstance(scorer, QKScorer) else []

    def record(self) -> Trace:
        """Begin to record what is resident when. The trace fills while the model runs, until the next call.

        One recording at a time. `trace.write_html(path)` draws it.
        """
        trace = Trace(self._summary)
        self._session.events.observer = trace
        if self.length:
            self._session.events.truncated(self.length, self.resident_chunks)
        return trace

    def _summary(self) -> Summary:
        mass = self.evicted_mass
        facts = [
            ("pool", f"{self.pool:,} tokens on the device, {_mib(self.device_bytes)}"),
            ("context", f"{self.n_ctx:,} tokens"),
            ("read", f"{self.length:,} tokens in {self.chunks:,} chunks, {self.resident:,} of them resident"),
            ("policy", self.policy),
            ("recalled", f"{self.page_ins:,} chunks, {_mib(self.bytes_in)}"),
            ("copied to the host", f"{self.page_outs:,} chunks, {_mib(self.bytes_out)}"),
            ("host memory", f"{_mib(self.host_bytes)} of page images, and {_mib(self.spilled_bytes)} spilled"),
            ("attention on paged-out text", "not estimated" if mass is None else f"about {mass * 100:.0f} %"),
            ("banner", self.banner()),
        ]
        return Summary(facts=facts, evicted_mass=mass)

    @property
    def configured_pins(self) -> tuple[tuple[int, int], ...]:
        """Ranges that the configuration names."""
        return tuple(self._session.config.pins)

    def unpin(self) -> None:
        """Let every pinned token go again, those of the configuration too."""
        self._session.table.unpin_all()

    def banner(self) -> str:
        """One line that says what runs."""
        info = self._session.engine.info
        most = info.page_bytes * -(-self.n_ctx // CHUNK) if self._session.bounded else 0
        types = info.type_k if info.type_v in (info.type_k, "") else f"{info.type_k}/{info.type_v}"
        return (
            f"kvflash: pool {self.pool} of {self.n_ctx} tokens ({self._size.why}{self._shares()}), "
            f"{self.device_bytes / 2**20:.1f} MiB on {self._where()}, up to {most / 2**20:.0f} MiB on the host"
            f"{' (page-locked)' if info.pinned else ''}, KV {types}, "
            f"{self._reading()}{self._drafts()}, policy {self.policy}{self._index()}, "
            f"{info.n_layers} layers pooled{self._windows()}"
        )

    def _shares(self) -> str:
        count, shared = self._size.parallel, self._session.config.is_elastic
        each = ", and more while others are idle" if shared and self._session.bounded else ""
        return f", for each of {count} sequences{each}" if count > 1 else ""

    def _where(self) -> str:
        devices = self.devices
        return " and ".join(f"{x.name}{_told(x, among=len(devices))}" for x in devices)

    def _reading(self) -> str:
        reading, stage = self._session.reading, self.stage
        if not self._session.bounded:
            return "reading exact"
        if not reading.exact:
            return f"reading by the pool ({reading.why})"
        size = f"{stage} tokens in view: {reading.why}, {self.stage_bytes / 2**20:.1f} MiB"
        return f"reading {'and answering ' if reading.answers_exactly else ''}exact ({size})"

    def _drafts(self) -> str:
        if self._speculator is None:
            return ""
        lone = ", ".join(one.drafter.name for one in self._speculator.asked if one.lone)
        when = f" ({lone} while one text is decoded alone)" if lone else ""
        return f", drafts by {', '.join(self._speculator.types)}{when}"

    def _windows(self) -> str:
        window = self._session.engine.info.n_swa
        if window == 0:
            return ""
        kept = f"all {self.n_ctx}" if self._swa_full else f"the last {window}"
        return f", sliding-window layers keep {kept} tokens (swa_full={self._swa_full})"

    def _index(self) -> str:
        scoring = self._session.scoring
        size = 0 if scoring is None else scoring.scorer.index_bytes
        if not size:
            return ""
        return f" ({self._heads}{size / 2**20:.1f} MiB of index)"

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
