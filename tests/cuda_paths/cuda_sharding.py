"""Trains sharded models of eight ranks on fake tensors of cuda:0. Writes JSON.

FSDP resizes storages, which tensors with values elsewhere cannot do. Fake tensors have shapes, types and devices but no
values, and the process group `fake` has ranks but no peers. So this shows where tensors are, not what they hold.
"""

from __future__ import annotations

import json
import os
import traceback
import warnings

import cuda_device as device  # before torch
import torch
import torch.distributed as dist
from cuda_child import model, step
from cuda_scenarios import RANKS, SHARDING
from mirror import MirrorStore
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the process group
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Answers(TorchDispatchMode):
    """A fake tensor has no value to read. Answer 0 ("nothing is wrong"), and count what would wait for the device."""

    def __init__(self):
        super().__init__()
        self.reads, self.moves = 0, device.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        if packet is aten._local_scalar_dense and isinstance(args[0], FakeTensor):
            self.reads += args[0].device.type == "cuda"
            return 0 if args[0].device.type == "cuda" else 1  # on the host there are only counters of steps
        to = (kwargs or {}).get("device") if packet is aten._to_copy else None
        if to is not None and torch.device(to).type != args[0].device.type:
            self.moves[device._line(func)] += 1
        return func(*args, **(kwargs or {}))


def made():
    with torch.device("cuda"):
        return model()


def train(fleet, scenario):
    from torch.distributed.tensor import DTensor

    from fleetx.comm import session

    session.reset()
    with Answers():
        fleet.init(checks=fleet.Checks(same_parameters=0))
        assert fleet.device() == device.CUDA
        net = made()
        if scenario.adam:
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.0)
        else:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        net, optimizer = fleet.distribute(net, optimizer, fleet.DistributedStrategy(**scenario.strategy))
        for _ in range(2):
            step(fleet, net, optimizer, torch.randn(8, 128, device="cuda"))
    updates = 0
    with Answers() as answers:
        for _ in range(2):
            step(fleet, net, optimizer, torch.randn(8, 128, device="cuda"))
            updates += fleet.updated
    shards = [p for p in net.parameters() if isinstance(p, DTensor)]
    assert shards, "nothing is sharded"
    assert all(p.to_local().device == device.CUDA for p in shards)
    held = sum(p.to_local().numel() for p in shards) / sum(p.numel() for p in shards)
    return {"updates": updates, "reads": answers.reads, "moves": answers.moves, "held": held}


def real_meshes():
    """Which rank is where is computed on the host, with real numbers."""
    from torch.distributed import device_mesh

    plain = device_mesh.init_device_mesh

    def init(*args, **kwargs):
        with unset_fake_temporarily():
            return plain(*args, **kwargs)

    device_mesh.init_device_mesh = init


def main(out):
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
    from fleetx import fleet

    real_meshes()
    store = MirrorStore(RANKS)
    dist.init_process_group("fake", store=store, rank=0, world_size=RANKS)
    os.environ["FLEETX_DEVICE"] = "cuda"
    found = {}
    for scenario in SHARDING:
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                found[scenario.name] = train(fleet, scenario)
        except Exception:
            found[scenario.name] = {"failed": traceback.format_exc()}
    with open(out, "w") as file:
        json.dump(found, file)
    os._exit(0)
