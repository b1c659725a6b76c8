"""Usage and timings of an answer, as clients read them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from .. import __version__
from ..batching.messages import Finished, Preview, Sampling, Usage

FINGERPRINT = f"kvflash-{__version__}"


def heading(id: str, kind: str, alias: str) -> dict[str, Any]:
    """Return the fields that each object of OpenAI's interface begins with. kind: of the object. alias: the model's
    name.
    """
    return {
        "id": id, "object": kind, "created": int(time.time()), "model": alias, "system_fingerprint": FINGERPRINT,
    }  # fmt: skip


def together(ended: Sequence[Finished], *, each: int) -> Finished:
    """Sum up several answers. each: answers to a prompt, whose tokens count once.

    The report is the last one's, but for the counts of drafts.
    """
    took, read = [end.usage for end in ended], [end.usage for end in ended[::each]]
    previews = [one.preview for one in read if one.preview is not None]
    sums = Usage(
        prompt=sum(one.prompt for one in read),
        cached=sum(one.cached for one in read),
        generated=sum(one.generated for one in took),
        queue_s=took[0].queue_s,
        restore_s=sum(one.restore_s for one in took),
        prompt_s=sum(one.prompt_s for one in took),
        generation_s=sum(one.generation_s for one in took),
        preview=Preview(read=sum(one.read for one in previews), prompt=sum(one.prompt for one in previews))
        if previews
        else None,
    )
    last = ended[-1].report
    drafts = {
        name: sum(end.report[name] for end in ended) for name in ("drafted", "accepted", "replaced") if name in last
    }
    return replace(ended[-1], usage=sums, report={**last, **drafts})


def usage(took: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": took.prompt,
        "completion_tokens": took.generated,
        "total_tokens": took.prompt + took.generated,
        "prompt_tokens_details": {"cached_tokens": took.cached},
    }


def timings(finished: Finished) -> dict[str, Any]:
    """Return the timings as llama-server has them, in milliseconds. `draft_n` is there where an answer had drafts."""
    took, drafted = finished.usage, finished.report.get("drafted", 0)
    drafts = {"draft_n": drafted, "draft_n_accepted": finished.report.get("accepted", 0)} if drafted else {}
    read = took.prompt - took.cached if took.preview is None else took.preview.read
    made = took.generated
    return {
        "cache_n": took.cached,
        "prompt_n": read,
        "prompt_ms": round(took.prompt_s * 1e3, 3),
        "prompt_per_token_ms": round(took.prompt_s * 1e3 / read, 3) if read else 0.0,
        "prompt_per_second": round(read / took.prompt_s, 3) if took.prompt_s > 0 else 0.0,
        "predicted_n": made,
        "predicted_ms": round(took.generation_s * 1e3, 3),
        # the first token comes with the prompt
        "predicted_per_token_ms": round(took.generation_s * 1e3 / (made - 1), 3) if made > 1 else 0.0,
        "predicted_per_second": round((made - 1) / took.generation_s, 3) if took.generation_s > 0 and made > 1 else 0.0,
        **drafts,
    }


def generation_settings(sampling: Sampling, most: int) -> dict[str, Any]:
    """Return how an answer of up to `most` tokens is sampled, by llama-server's names. A grammar is not repeated."""
    bias = [{"token": token, "bias": value} for token, value in sampling.logit_bias.items()]
    told = asdict(replace(sampling, logit_bias={}, grammar=None))
    return {**told, "logit_bias": bias, "n_predict": most, "max_tokens": most}


def report(wanted: str, finished: Finished, left_out: int) -> dict[str, Any]:
    """Return `kvflash` of an answer, if it is wanted. A preview and messages that are left out are always told."""
    took, told = finished.usage, dict[str, Any]()
    if wanted != "none":
        times = {"queue_ms": round(took.queue_s * 1e3, 3), "restore_ms": round(took.restore_s * 1e3, 3)}
        told = {**finished.report, **times}
    told |= marked(took.preview).get("kvflash", {})
    told |= {"left_out": left_out} if left_out else {}
    return {"kvflash": told} if told else {}


def marked(preview: Preview | None) -> dict[str, Any]:
    """Return `kvflash` with the mark of a preview; nothing for another answer."""
    return {} if preview is None else {"kvflash": {"preview": asdict(preview)}}


def overflow_header(left_out: int) -> dict[str, str]:
    """Return the header of an answer to a chat that has lost messages."""
    return {"X-KVFlash-Overflow": f"left out the {left_out} oldest messages"} if left_out else {}


def preview_header(preview: Preview | None) -> dict[str, str]:
    """Return the header of a whole answer that is a preview."""
    return {} if preview is None else {"X-KVFlash-Preview": f"read {preview.read} of {preview.prompt} tokens"}
