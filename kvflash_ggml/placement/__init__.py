"""Decides which weights go to which device, how many slots a pool has, and how large a step is.

Begin with `sizes.py`, the values, and `plan.py`. Arithmetic is pure; `memory.py`, `measure.py`, `predict.py`,
`sizing.py` and `devices.py` ask the native library when they are called, not when they are imported.
"""
