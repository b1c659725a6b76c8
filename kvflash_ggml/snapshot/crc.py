"""CRC-32 of bytes that are read in pieces, several at a time: from the checksums of the pieces."""

from __future__ import annotations

from functools import lru_cache

POLYNOMIAL = 0xEDB88320
"""Of zlib's CRC-32: the highest power is the lowest bit."""

ONE = 1 << 31


def joined(first: int, second: int, size: int) -> int:
    """The checksum of two pieces, one after the other. size: of the second one, in bytes."""
    return _product(first, _shift(size)) ^ second


@lru_cache(maxsize=16)
def _shift(size: int) -> int:
    """What so many bytes after it do to a checksum: x^(8*size) modulo the polynomial."""
    power, square, left = ONE, ONE >> 8, size
    while left:
        if left & 1:
            power = _product(power, square)
        square = _product(square, square)
        left >>= 1
    return power


def _product(a: int, b: int) -> int:
    """Of two polynomials over two elements, modulo `POLYNOMIAL`."""
    total = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            total ^= b
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return total
