"""Change the rate of a lab's links while processes run on it, so that one run covers all rates.

Set-up, such as DDP's first broadcast, can then run on a fast link.
"""

from __future__ import annotations

import torch.distributed as dist

from benchmarks.netlab import Lab, link
from benchmarks.netlab.counters import INTERFACE
from benchmarks.netlab.namespaces import tool

End = tuple[str, str]  # a namespace and the shaped interface in it


def ends(lab: Lab) -> list[End]:
    """Both ends of every cable, because a host must neither send nor receive faster than the rate."""
    switch = lab.name(0).removesuffix("host0") + "switch"
    return [end for host in range(lab.hosts) for end in ((lab.name(host), INTERFACE), (switch, f"port{host}"))]


class Shaping:
    """In the workers: all of them must call `to(rate)`, and rank 0 applies it."""

    def __init__(self, ends: list[End]):
        self._ends, self._rate = [*ends], None

    def to(self, rate: str | None) -> None:
        """None: as fast as the machine. Transfers that are under way continue at the new rate."""
        if rate == self._rate:
            return
        self._rate = rate
        dist.barrier()
        if dist.get_rank() == 0:
            for namespace, interface in self._ends:
                words = ["tc", "-n", namespace, "qdisc", "replace" if rate else "del", "dev", interface, "root"]
                tool(*words, *(link.shaper(rate) if rate else ()), need="tbf")
        dist.barrier()
