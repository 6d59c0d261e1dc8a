"""How fast a link is for an all-reduce of gloo. Each host has one worker, started by `fleetrun --ips`.

This file is also what the workers run: fleetrun reduce.py BYTES.
"""

from __future__ import annotations

import json
import os
import sys
import time

from benchmarks.netlab import counters
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.measured import Measured


def reduce(lab: Lab, *, size: int) -> Measured:
    """An all-reduce of a tensor of `size` bytes: the slowest worker's time, and the bytes that host 0 sent.

    In a ring of n every worker sends each 1/n of the tensor 2 (n - 1) times: first the sums, then the results.
    """
    runs = lab.fleetrun(__file__, [str(size)])
    each = [json.loads(run.stdout.splitlines()[-1]) for run in runs]
    payload = round(size * 2 * (lab.hosts - 1) / lab.hosts)
    return Measured("gloo all-reduce", max(worker["seconds"] for worker in each), payload, each[0]["sent"])


def work(size: int) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.ones(size // 4)
    dist.all_reduce(tensor[:1000])  # connections are made by the first
    dist.barrier()
    before, start = counters.here(), time.perf_counter()
    dist.all_reduce(tensor)
    seconds = time.perf_counter() - start
    dist.barrier()  # behind the last bytes: those that still stood in a queue are counted too
    sent = (counters.here() - before).sent
    assert tensor[-1] == dist.get_world_size()
    dist.barrier()  # nobody leaves while another still needs it
    print(json.dumps({"seconds": seconds, "sent": sent}), flush=True)
    os._exit(0)  # at once: gloo's threads abort an orderly exit now and then


if __name__ == "__main__":
    work(int(sys.argv[1]))
