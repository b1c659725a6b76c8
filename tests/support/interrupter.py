"""Ctrl-C at a line of one's choice."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import kvflash_ggml

ROOT = Path(kvflash_ggml.__file__).parent


class Interrupter:
    """Raises KeyboardInterrupt at the k-th line that is run in some of our files."""

    def __init__(self, k: int, files: tuple[str, ...]) -> None:
        self.left = k
        assert all((ROOT / file).is_file() for file in files)
        self.files = {str(ROOT / file) for file in files}
        self.stack: list[str] = []

    def run(self, work: Callable[[], object]) -> bool:
        """False if the work was done before."""
        sys.settrace(self._enter)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename in self.files else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.left -= event == "line"
        if self.left == 0:
            at: FrameType | None = frame
            while at is not None and len(self.stack) < 16:
                self.stack.append(at.f_code.co_name)
                at = at.f_back
            raise KeyboardInterrupt
        return self._line
