"""A rate such as 100mbit, and the token bucket (tbf) that holds a link to it."""

from __future__ import annotations

import re

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
PAYLOAD = 1448 / 1514  # of a full frame of Ethernet, below TCP with its timestamps: the best that a program can see

# What may pass at once. Too much, and a small message never feels the link: with the usual 128 kB, 50 kB take 0.2 ms at
# 100 Mbit/s instead of 4. Too little, and the bucket is full before the kernel's timer comes back for it: 1 Gbit/s
# became 0.8 with half of this. Packets that are larger than the bucket are taken apart by the shaper.
BURST_SECONDS = 0.001
LEAST_BURST = 2 * 1600  # bytes: two frames
LATENCY = "100ms"  # of the queue before packets are dropped


def bits(rate: str) -> float:
    """The bits a second that a rate means."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate.lower())
    if not found or not float(found[1]):
        raise ValueError(f"rate {rate!r}: expected a number with {', '.join(UNITS)}, such as 100mbit or 1gbit")
    return float(found[1]) * UNITS[found[2]]


def shaper(rate: str) -> list[str]:
    """The words that tc wants."""
    burst = max(LEAST_BURST, round(bits(rate) / 8 * BURST_SECONDS))
    return ["tbf", "rate", f"{bits(rate):.0f}bit", "burst", str(burst), "latency", LATENCY]
