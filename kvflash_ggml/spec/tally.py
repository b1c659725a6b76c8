"""What came of drafts, counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .draft import Draft


@dataclass(slots=True)
class Source:
    """Of one drafter: steps that verified its drafts, tokens of it that were verified, and that were accepted."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class Tally:
    """Steps of a time, and what they won.

    steps: those that verified a draft; each wins one token more than it accepts. plain_steps: others that generated.
    drafted, accepted: tokens. reached, agreed: per position of a draft, how often it was looked at, and how often it
    was accepted. seconds_draft, seconds_verify: taken by drafters, and by the steps that verified. bad_drafts: that
    could not be verified. lucky: tokens won by rows that only fill a step.
    """

    steps: int = 0
    plain_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    reached: list[int] = field(default_factory=list)
    agreed: list[int] = field(default_factory=list)
    by_source: dict[str, Source] = field(default_factory=dict)
    seconds_draft: float = 0.0
    seconds_verify: float = 0.0
    seconds_plain: float = 0.0
    bad_drafts: int = 0
    lucky: int = 0

    @property
    def rate(self) -> float | None:
        """Share of the drafted tokens that was accepted, 0 to 1; None if none was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_length(self) -> float | None:
        """Tokens won by a step that verified, the last one chosen by the target included; None without such steps."""
        return 1 + (self.accepted + self.lucky) / self.steps if self.steps else None

    @property
    def per_position(self) -> tuple[float, ...]:
        """Share accepted of those drafts that were right before, by their position after the newest token."""
        return tuple(b / a for a, b in zip(self.reached, self.agreed, strict=True))

    def plain(self, seconds: float, drafting: float = 0.0) -> None:
        """One token was generated without a draft, in so much time, and in what drafters took."""
        self.plain_steps += 1
        self.seconds_plain += seconds
        self.seconds_draft += drafting

    def verified(
        self, draft: Draft, path: Sequence[int], seconds: float, drafting: float = 0.0, *, stopped: bool = False
    ) -> None:
        """Of a draft the nodes of `path` were right, from the first on. stopped: what follows was not looked at."""
        accepted = len(path)
        own = self.by_source.setdefault(draft.source, Source())
        for counts in (self, own):
            counts.steps += 1
            counts.drafted += len(draft)
            counts.accepted += accepted
        self.seconds_verify += seconds
        self.seconds_draft += drafting
        looked_at = min(accepted + (not stopped), int(draft.depths().max()))
        self.reached += [0] * (looked_at - len(self.reached))
        self.agreed += [0] * (looked_at - len(self.agreed))
        for at in range(looked_at):
            self.reached[at] += 1
            self.agreed[at] += at < accepted
