#!/usr/bin/env python3
"""A DFlash checkpoint as a GGUF file: `kvflash-convert draft` from a checkout, with numpy and click alone."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvflash_ggml.cli.convert import draft

if __name__ == "__main__":
    draft()
