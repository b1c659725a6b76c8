"""How long the steps of a prompt are while answers run, and how many steps these decode between two of them."""

from __future__ import annotations

PROMPT_ROWS = 1024
"""Tokens of a prompt step while other answers run, at most: their streams wait for the whole of it."""

LEAST_ROWS = 64
"""And at least."""

DECODE_SHARE = 0.5
"""Without a target, answers decode between two prompt steps for so much of the time that a prompt step takes."""

DEARER = 1.5
"""Half a step may cost so many times as much for each token. A streamed step copies the text however short it is."""

MOST_STEPS = 16
"""Steps of the running answers between two prompt steps, at most: the prompt has to come to its end."""


class Pace:
    """Follows a target for the time between two tokens of a stream, in seconds; None for none.

    A prompt step becomes shorter until it takes no longer than the target, with the step of the answers behind it.
    Where that is not to be had, the answers decode several steps before the next one, so that the mean fits. Nothing
    here looks at a clock.

    shared: rows that a step of several prompts can have. rows: tokens of the next prompt step, at most.
    """

    def __init__(self, target: float | None, shared: int = PROMPT_ROWS) -> None:
        self._target, self._shared = target, shared
        self._prompt = self._decode = 0.0  # seconds of the newest step of each kind
        self.rows = PROMPT_ROWS
        self.begin()

    @property
    def shared_rows(self) -> int:
        """Tokens of a step that several prompts share, at most."""
        return min(self._shared, self.rows)

    def begin(self) -> None:
        """Begin another prompt: of another text, which costs other times."""
        self._least = LEAST_ROWS
        self._before: float | None = None  # seconds of a token before the step was halved

    def read(self, rows: int, seconds: float) -> None:
        """Note a prompt step of so many tokens, for which the answers waited."""
        self._prompt = seconds
        if self._target is None:
            return
        each, before, left = seconds / rows, self._before, self._target - self._decode
        self._before = None
        if before is not None and each > DEARER * before:
            self._least = self.rows = 2 * rows
        elif seconds > left and rows > self._least:
            self.rows, self._before = max(self._least, rows // 2), each
        elif 2 * seconds <= left:
            self.rows = min(PROMPT_ROWS, max(self.rows, 2 * rows))

    def goes_on(self, steps: int, seconds: float) -> bool:
        """Tell whether the answers go on, after so many steps since the prompt step, one or more, in so long."""
        if self._target is None:
            return seconds < DECODE_SHARE * self._prompt
        self._decode = seconds / steps
        left = self._target - self._decode
        return steps < MOST_STEPS and steps * left < self._prompt
