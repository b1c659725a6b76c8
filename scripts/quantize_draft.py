#!/usr/bin/env python3
"""A drafter's GGUF file made smaller: `kvflash-convert quantize` from a checkout, with numpy, click and gguf alone."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvflash_ggml.cli.convert import quantize

if __name__ == "__main__":
    quantize()
