"""Bytes as people write them."""

from __future__ import annotations

import re

UNITS = {"": 1, "b": 1} | {f"{letter}{kind}": base ** (power + 1)
         for kind, base in (("b", 1000), ("ib", 1024), ("", 1024))
         for power, letter in enumerate("kmgt")}  # fmt: skip


def parse(text: str) -> int:
    """'6GiB', '800 MB', '1.5g'. Raises ValueError."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", text)
    if not found or found[2].lower() not in UNITS:
        raise ValueError(f"{text!r} is not a number of bytes such as '6GiB' or '800MB'")
    bytes_ = float(found[1]) * UNITS[found[2].lower()]
    if bytes_ < 1 or (not found[2] and "." in found[1]):
        raise ValueError(f"{text!r} is not a number of bytes such as '6GiB' or '800MB'")
    return int(bytes_)


def words(bytes_: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(bytes_) < 1024:
            return f"{bytes_:.0f} B" if unit == "B" else f"{bytes_:.1f} {unit}"
        bytes_ /= 1024
    return f"{bytes_:.3f} GiB"
