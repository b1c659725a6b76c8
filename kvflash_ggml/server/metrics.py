"""`/metrics`: vLLM's names where the meaning is theirs, under `kvflash:`. No label holds a text, a key or a name."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..batching.messages import INTERNAL, NUMERICAL, Access, Request, Usage
from ..batching.scheduler import Scheduler
from .front import Front

_OF_TEXT = (b"kvflash:kv_cache_usage_perc", b"kvflash:evicted_mass")

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


async def show(front: Front, request: HttpRequest) -> Response:
    """Report counters and gauges in Prometheus's format."""
    text = request.app.state.metrics.text(front.access(request))
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


class Metrics:
    """Collects metrics. The scheduler calls `ended`; `attach` sets the scheduler whose counters are shown."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._scheduler: Scheduler | None = None

        def histogram(name: str, what: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(name, what, namespace="", buckets=buckets, registry=self._registry)

        self._first = histogram("kvflash:time_to_first_token_seconds", "From submission to the first token.")
        self._between = histogram("kvflash:inter_token_latency_seconds", "Mean of an answer's tokens.", _STEP)
        self._whole = histogram("kvflash:e2e_request_latency_seconds", "From submission to the end.")
        self._queued = histogram("kvflash:request_queue_time_seconds", "Until the slot was free.")
        self._restored = histogram("kvflash:restore_seconds", "To bring a conversation's text to hand.", _STEP)
        self._registry.register(self)

    def attach(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def ended(self, request: Request, usage: Usage, reason: str) -> None:
        """Count a request that was answered, or left the queue."""
        took = usage.queue_s + usage.restore_s + usage.prompt_s
        self._queued.observe(usage.queue_s)
        if usage.generated:
            self._first.observe(took)
            self._restored.observe(usage.restore_s)
        if usage.generated > 1:
            self._between.observe(usage.generation_s / (usage.generated - 1))
        self._whole.observe(took + usage.generation_s)

    def text(self, access: Access) -> bytes:
        """Return all metrics, without the gauges of the current text where `access` may not see it."""
        lines = generate_latest(self._registry).splitlines(keepends=True)
        shown = self._scheduler is not None and self._scheduler.conversations.seen(access, lambda: True)
        return b"".join(line for line in lines if shown or not any(name in line for name in _OF_TEXT))

    def collect(self) -> Iterator[Metric]:
        scheduler = self._scheduler
        if scheduler is None:
            return
        model, totals, slot, swapped = (
            scheduler.counters(),
            scheduler.outcomes.totals,
            scheduler.counts,
            scheduler.swapped,
        )
        blocks = model["pool"] // 64
        used = model["resident"] / blocks if blocks else 0.0
        gauges = {
            "num_requests_running": ("Answers that are being made.", len(scheduler.running)),
            "num_requests_waiting": ("Requests in the queue.", len(scheduler.waiting)),
            "num_requests_put_aside": ("Answers swapped out until their readers catch up.", scheduler.put_aside),
            "kv_cache_usage_perc": ("Share of the pool's blocks that the texts have.", used),
            "pool_blocks": ("Blocks of the pool.", blocks),
            "device_bytes": ("The pool on the device.", model["device_bytes"]),
            "host_bytes": ("Page images in host memory.", model["host_bytes"]),
            "spilled_bytes": ("Page images in the spill file.", model["spilled_bytes"]),
            "parked_bytes": ("Conversations swapped out to memory.", swapped.size),
        }
        for name, (what, value) in gauges.items():
            yield GaugeMetricFamily(f"kvflash:{name}", what, value=value)
        masses = [one.model.counters()["evicted_mass"] for one in scheduler.slots]
        mass = GaugeMetricFamily("kvflash:evicted_mass", "Largest share of a text's attention on evicted chunks.")
        if known := [one for one in masses if one is not None]:
            mass.add_metric([], max(known))
        yield mass
        gap = GaugeMetricFamily(
            "kvflash:inter_token_gap_seconds", "Between two of the newest 4,096 tokens.", labels=["quantile"]
        )
        seconds = sorted(scheduler.gaps.copy())
        for share in (0.5, 0.99) if seconds else ():
            gap.add_metric([str(share)], seconds[int(share * (len(seconds) - 1))])
        yield gap
        where = GaugeMetricFamily("kvflash:conversations", "Conversations that are known.", labels=["state"])
        for state, count in scheduler.conversations.places(Access()).items():
            where.add_metric([state], count)
        yield where
        counters = {
            "prompt_tokens": ("Tokens of prompts.", totals.prompt_tokens),
            "generation_tokens": ("Tokens of answers.", totals.generated_tokens),
            "prefix_cache_queries": ("Tokens of prompts that were looked for.", totals.prompt_tokens),
            "prefix_cache_hits": ("Tokens of prompts that were not read again.", totals.cached_tokens),
            "prefix_missed": ("Prompts that differ from a kept text before their last message.", totals.missed),
            "num_preemptions": ("Answers that were swapped out for slow readers or others.", scheduler.stalls),
            "spec_decode_num_draft_tokens": ("Tokens of drafts that were verified.", model["drafted_total"]),
            "spec_decode_num_accepted_tokens": ("Tokens of drafts that were accepted.", model["accepted_total"]),
            "spec_decode_num_replaced_tokens": ("Tokens drawn in place of drafted ones.", model["replaced_total"]),
            "page_ins": ("Chunks that came back from the host.", model["page_ins"]),
            "page_outs": ("Chunks that were copied to the host.", model["page_outs"]),
            "conversation_parks": ("Texts that were swapped out.", slot.swapped_out),
            "conversation_resumes": ("Texts that were swapped in.", slot.resumes),
            "conversation_forks": ("Texts that continue a part of another.", slot.forks),
            "conversations_lost": ("Texts that had to be read again.", slot.lost),
            "conversations_stored": ("Texts that left memory for the folder.", swapped.counts.stored),
            "conversations_dropped": ("Texts that were dropped for want of room.", swapped.counts.dropped),
            "conversations_not_stored": ("Texts that the folder did not take.", swapped.counts.failed),
            "store_writes": ("Texts that were written to the shared store.", swapped.counts.written),
            "store_takeovers": ("Texts that were fetched from the shared store.", swapped.counts.taken),
            "store_copies": ("Texts that went on as a copy, as another server had them.", swapped.counts.copied),
        }
        for name, (what, value) in counters.items():
            yield CounterMetricFamily(f"kvflash:{name}", what, value=value)
        ended = CounterMetricFamily(
            "kvflash:request_success", "Requests by how they ended.", labels=["finished_reason"]
        )
        # failures from the start: an alert of a growing counter does not see one that appears
        for reason, count in {INTERNAL: 0, NUMERICAL: 0, **totals.finished}.items():
            ended.add_metric([reason], count)
        yield ended
