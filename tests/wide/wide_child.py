"""Trains two steps of every strategy as one rank of many: `wide_child.py FOLDER RANKS...`. Writes what it cost as JSON.

A process for each number of ranks, because a process group cannot change its size; forks, because torch is large.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings

import mirror
import torch
import torch._dynamo  # the first optimizer imports it: once, before the forks
import torch.distributed.fsdp
from torch import nn

from fleetx import fleet
from fleetx.comm import session

PER_HOST = 8
ANCHORS = {"sharding_segment_strategy": "segment_anchors", "segment_anchors": ["0", "1", "2"]}
ON_HOSTS = {"sharding": {"stage": 3, "sharding_degree": PER_HOST, "hybrid_dp": True, **ANCHORS}}
STRATEGIES = {
    "data parallelism": {},
    "gradient_merge": {"gradient_merge": {"k_steps": 2}},
    "amp float16": {"amp": True},
    "clip": {"clip": True},
    "lars": {"lars": True},
    "lamb": {"lamb": True},
    "muon": {"muon": True},
    "recompute": {"recompute": {"checkpoints": ["0", "1"]}},
    "sync_batch_norm": {"sync_batch_norm": True},
    "fp16_allreduce": {"fp16_allreduce": True},
    "quantized_allreduce": {"quantized_allreduce": True},
    "dgc": {"dgc": {"sparsity": [0.999]}},
    "localsgd": {"localsgd": {"k_steps": 2}},
    "adaptive_localsgd": {"adaptive_localsgd": True},
    "ema": {"ema": {"decay": 0.9}},
    "noise_scale": {"noise_scale": {"every": 1}},
    "two communicators": {"nccl_comm_num": 2},
    "hierarchical": {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": PER_HOST},
    "sharding": {"sharding": {"stage": 3, **ANCHORS}},
    "sharding on hosts": ON_HOSTS,
    "sharding on hosts, fp16_allreduce": {**ON_HOSTS, "fp16_allreduce": True},
    "sharding on hosts, quantized_allreduce": {**ON_HOSTS, "quantized_allreduce": True},
    "sharding on hosts, dgc": {**ON_HOSTS, "dgc": {"sparsity": [0.999]}},
    "sharding on hosts, localsgd": {**ON_HOSTS, "localsgd": {"k_steps": 2}},
    "sharding on hosts, muon": {**ON_HOSTS, "muon": True},
    "pipeline": {"pipeline": {"stages": ["1", "2.0", "2.1"], "micro_batch": 4}},
    "pipeline, interleaved, amp, clip": {
        "pipeline": {"stages": ["0.2", "1", "2"], "degree": 2, "micro_batch": 4, "schedule_mode": "Interleaved1F1B"},
        "amp": True,
        "clip": True,
    },
    "sharding, lamb, clip, amp": {"sharding": {"stage": 3, **ANCHORS}, "lamb": True, "clip": True, "amp": True},
}


def model():
    def block():
        return nn.Sequential(nn.Linear(128, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 128))

    torch.manual_seed(0)
    return nn.Sequential(block(), block(), block())


def run(declared):
    session.reset()
    fleet.init(checks=fleet.Checks(same_parameters=1))
    net = model()
    if {"lamb", "muon"} & set(declared):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.0)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    mirror.forget()
    start, counted = time.process_time(), Calls()
    with counted:
        net, optimizer = fleet.distribute(net, optimizer, fleet.DistributedStrategy(**declared))
    found = {"setup": dict(mirror.numbers), "groups": sum(mirror.groups.values())}
    if "pipeline" in declared:  # the model is cut at the first batch
        with counted:
            step(net, optimizer, True)
    found |= {"seconds": time.process_time() - start, "calls": counted.number}
    mirror.forget()
    for _ in range(2):
        step(net, optimizer, "pipeline" in declared)
    found |= {"step": {name: n / 2 for name, n in mirror.numbers.items()}, "updated": fleet.updated}
    fleet.flush()
    return found


def step(net, optimizer, scheduled):
    x = torch.randn(8, 128)
    if scheduled:
        fleet.forward_backward(x, x, loss_fn=lambda out, _: out.square().mean())
    else:
        fleet.backward(net(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()


class Calls:
    """Counts calls of Python functions: a measure of work that does not depend on the machine."""

    def __init__(self):
        self.number = 0

    def __enter__(self):
        sys.setprofile(self._see)

    def __exit__(self, *error):
        sys.setprofile(None)

    def _see(self, frame, event, arg):
        self.number += event == "call"


def train(ranks, out):
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    mirror.start(ranks)
    found = {}
    for name, declared in STRATEGIES.items():
        try:
            found[name] = run(declared)
        except Exception:
            found[name] = {"failed": traceback.format_exc()}
    with open(out, "w") as file:
        json.dump(found, file)


def main(folder, *worlds):
    started = []
    for ranks in worlds:
        started.append(os.fork())
        if not started[-1]:
            failed = 1
            try:
                train(int(ranks), os.path.join(folder, ranks))
                failed = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(failed)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in started))


if __name__ == "__main__":
    main(*sys.argv[1:])
