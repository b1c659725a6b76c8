"""What is read behind previews: prompts that were answered from a part, read whole while nobody waits."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from .messages import Access, Request, Sampling
from .queue import Job

PREVIEW = "preview"
"""The reading of a request whose prompt may be answered from a part of it."""

MOST = 64
"""Prompts that wait here. Of more, the one that waits longest is not read: its next turn reads it, or is a preview."""


class Behind:
    """Prompts to be read, the newest first. Used on the engine's thread."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque(maxlen=MOST)

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, request: Request, conversation: str, now: float) -> None:
        """Read the prompt of a request that a preview has answered, into a conversation of this identifier."""
        self.forget(request)
        whole = replace(
            request, id=f"{request.id}-whole", reading=None, max_tokens=0, sampling=Sampling(), stop=(), logprobs=None,
            timeout_s=None, queue_timeout_s=None,
        )  # fmt: skip
        self.put_back(Job(request=whole, sink=lambda event: None, submitted=now, behind=conversation))

    def put_back(self, job: Job) -> None:
        """Read this one next."""
        self._jobs.append(job)

    def take(self) -> Job | None:
        """Take the one to read now; None if there is none."""
        return self._jobs.pop() if self._jobs else None

    def forget(self, request: Request) -> None:
        """Do not read prompts that a request begins with: it reads them itself."""
        for job in list(self._jobs):
            mine = job.request
            begun = np.array_equal(mine.tokens, request.tokens[: len(mine.tokens)])
            if begun and request.reuse and mine.salt == request.salt:
                self._jobs.remove(job)

    def drop(self, id: str, access: Access) -> bool:
        """Drop a conversation; False if none of its name waits here."""
        gone = [job for job in self._jobs if job.behind == id and access.may(job.request.salt)]
        for job in gone:
            self._jobs.remove(job)
        return bool(gone)
