"""Files of sound, made here."""

from __future__ import annotations

import io
import struct
import wave

import numpy as np

RATE = 16000
FRAME = 640
"""Samples of one embedding of the projector in `support.vision`."""


def samples(rows: float, pitch: float = 440.0) -> np.ndarray:
    """A tone as long as so many embeddings, [samples] of 16 bits."""
    times = np.arange(round(rows * FRAME)) / RATE
    return np.round(12000 * np.sin(2 * np.pi * pitch * times) * (1 + times % 0.3)).astype("<i2")


def wav(rows: float, pitch: float = 440.0) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(RATE)
        writer.writeframes(samples(rows, pitch).tobytes())
    return file.getvalue()


def flac(rows: float, pitch: float = 440.0) -> bytes:
    """The same samples, not compressed: one frame of 65,536 at most."""
    tone = samples(rows, pitch)
    facts = (RATE << 44 | 15 << 36 | len(tone)).to_bytes(8, "big")
    about = struct.pack(">HH6x", len(tone), len(tone)) + facts + bytes(16)
    head = struct.pack(">HBBBH", 0xFFF8, 0x70, 0x08, 0, len(tone) - 1)
    frame = head + bytes([_crc(head, 8, 0x07)]) + b"\2" + tone.astype(">i2").tobytes()
    return b"fLaC\x80" + len(about).to_bytes(3, "big") + about + frame + _crc(frame, 16, 0x8005).to_bytes(2, "big")


def mp3(frames: int) -> bytes:
    """Silence: each frame is 1,152 samples at 44,100 Hz."""
    return (b"\xff\xfb\x90\xc4" + bytes(413)) * frames


def _crc(data: bytes, bits: int, polynomial: int) -> int:
    """FLAC's checksums."""
    crc, top = 0, 1 << (bits - 1)
    for byte in data:
        crc ^= byte << (bits - 8)
        for _ in range(8):
            crc = (crc << 1 ^ (polynomial if crc & top else 0)) & (2 * top - 1)
    return crc
