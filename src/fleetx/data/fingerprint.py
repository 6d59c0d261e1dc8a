"""A fingerprint that tells data apart: different files, or different samples built from the same files."""

from __future__ import annotations

import hashlib

import numpy as np

_CHUNKS, _CHUNK = 256, 4096  # large arrays are sampled: hashing all of one would take as long as reading it


def fingerprint(*parts: object) -> str:
    digest = hashlib.blake2b(digest_size=7)  # fits into an int64
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def array_bytes(values: np.ndarray) -> bytes:
    return repr((values.shape, values.dtype.str)).encode() + np.ascontiguousarray(values).tobytes()


def sampled_bytes(values: np.ndarray) -> bytes:
    """Like `array_bytes`, but only evenly spaced chunks of a large array."""
    if values.size <= _CHUNKS * _CHUNK:
        return array_bytes(values)
    flat = values.reshape(-1)
    starts = np.linspace(0, flat.size - _CHUNK, _CHUNKS).astype(np.int64).tolist()
    return repr((values.shape, values.dtype.str)).encode() + b"".join(flat[a : a + _CHUNK].tobytes() for a in starts)
