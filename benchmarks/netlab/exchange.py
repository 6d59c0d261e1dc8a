"""All-to-all and all-gather between two hosts, gloo's own and ours: python -m benchmarks.netlab.exchange --help

This file is also what the workers run: fleetrun exchange.py BYTES ROUNDS.
"""

from __future__ import annotations

import json
import os
import sys
import time
from statistics import median

import click

from benchmarks.frame import machine
from benchmarks.netlab.lab import Lab

METHODS = ["gloo all-to-all", "fleetx all-to-all", "gloo all-gather", "fleetx all-gather"]


def exchanged(lab: Lab, *, size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of the slowest worker, by method. Each host sends `size` bytes and receives as many."""
    runs = lab.fleetrun(__file__, [str(size), str(rounds)])
    each = [json.loads(run.stdout.splitlines()[-1]) for run in runs]
    return {name: [max(times) for times in zip(*(one[name] for one in each), strict=True)] for name in METHODS}


def work(size: int, rounds: int) -> None:
    import torch
    import torch.distributed as dist

    from fleetx.comm import duplex

    dist.init_process_group("gloo")
    hosts = dist.get_world_size()
    shares, share = torch.zeros(hosts, size, dtype=torch.uint8), torch.zeros(1, size, dtype=torch.uint8)
    out = torch.empty_like(shares)
    calls = [
        lambda: dist.all_to_all_single(out, shares),
        lambda: duplex.all_to_all(shares, None),
        lambda: dist.all_gather_single(out, share),
        lambda: duplex.all_gather(share, None),
    ]
    found: dict[str, list[float]] = {name: [] for name in METHODS}
    for _ in range(rounds + 1):  # connections are made in the first
        for name, call in zip(METHODS, calls, strict=True):
            dist.barrier()
            start = time.perf_counter()
            call()
            found[name].append(time.perf_counter() - start)
    dist.barrier()
    print(json.dumps({name: times[1:] for name, times in found.items()}), flush=True)
    os._exit(0)  # at once: gloo's threads abort an orderly exit now and then


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rate", default="100mbit", show_default=True, help="Of the link, each way.")
@click.option("--size", default=3_200_000, show_default=True, help="Bytes that each host sends.")
@click.option("--rounds", default=15, show_default=True)
def main(rate: str, size: int, rounds: int) -> None:
    """Time collectives that send as much as they receive, taking turns."""
    with Lab(hosts=2, rate=rate) as lab:
        found = exchanged(lab, size=size, rounds=rounds)
        print(f"{size:,} bytes each way at {rate}: {1e3 * size * 8 / (lab.bits or 1):.0f} ms without headers")
    for name, times in found.items():
        print(f"{name:18} median {1e3 * median(times):6.1f} ms, {1e3 * min(times):.1f} to {1e3 * max(times):.1f}")
    print(f"load {machine.load()[0]:.2f}")


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].isdigit():
        work(int(sys.argv[1]), int(sys.argv[2]))
    else:
        main(prog_name="python -m benchmarks.netlab.exchange")
