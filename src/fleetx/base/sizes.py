"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

UNITS = {"": 1, "b": 1} | {f"{letter}{kind}": base ** (power + 1)
         for kind, base in (("b", 1000), ("ib", 1024), ("", 1024))
         for power, letter in enumerate("kmgt")}  # fmt: skip


def parse_bytes(text: str) -> int:
    """Parse '6GiB', '800 MB' or '1.5g'. Raises ValueError."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", text)
    size = float(match[1]) * UNITS.get(match[2].lower(), 0) if match else 0
    if size < 1 or (match and not match[2] and "." in match[1]):
        raise ValueError(f"{text!r} is not a number of bytes: write it as '6GiB' or '800MB'")
    return int(size)


def format_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.3f} GiB"
