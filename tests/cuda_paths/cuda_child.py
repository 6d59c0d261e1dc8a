"""Runs scenarios on the CPU and on the device of cuda_device.py, alone or as one of two ranks. Writes JSON."""

from __future__ import annotations

import json
import os
import traceback
import warnings

import cuda_device as device  # before torch
import torch
import torch.distributed as dist
from cuda_scenarios import ALONE, TWO_RANKS
from torch import nn

STEPS, WARM = 4, 2  # gradients are merged two by two; what happens once happens in the first steps


def model():
    torch.manual_seed(0)

    def block():  # no biases before a BatchNorm: their gradient is rounding noise, which LAMB would make large
        return nn.Sequential(
            nn.Linear(128, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 128, bias=False)
        )

    return nn.Sequential(block(), block(), block())


def train(fleet, scenario, kind):
    """The weights, the accounts of the last steps, and how many of them updated."""
    from fleetx.comm import session

    session.reset()
    os.environ["FLEETX_DEVICE"] = kind
    fleet.init(checks=fleet.Checks(same_parameters=0))
    assert fleet.device() == torch.device("cpu" if kind == "cpu" else "cuda:0")
    net = model().to(fleet.device())
    if scenario.adam:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.0)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    strategy = fleet.DistributedStrategy(**scenario.strategy)
    if kind == "cpu" and "recompute" in scenario.strategy:  # there is nowhere to offload to
        strategy.recompute_configs = {"checkpoints": ["0", "1"]}
    net, optimizer = fleet.distribute(net, optimizer, strategy)
    torch.manual_seed(1 + fleet.replica_index())
    batches = [torch.randn(8, 128).to(fleet.device()) for _ in range(STEPS)]
    updates = 0
    for x in batches[:WARM]:
        step(fleet, net, optimizer, x, scenario)
    with device.accounts() as seen:
        for x in batches[WARM:]:
            step(fleet, net, optimizer, x, scenario)
            updates += fleet.updated
    held = [p for p in net.parameters() if not p.is_meta]  # the rest is on other ranks
    assert all(t.device == fleet.device() for t in [*held, *net.buffers()])
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()]
    assert all(v.device == fleet.device() for v in state)
    return torch.cat([p.detach().cpu().flatten() for p in held]), seen, updates


def step(fleet, net, optimizer, x, scenario=None):
    if scenario is not None and "pipeline" in scenario.strategy:
        fleet.forward_backward(x, x, loss_fn=lambda out, _: out.square().mean())
    else:
        fleet.backward(net(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def compare(fleet, scenario):
    expected, _, _ = train(fleet, scenario, "cpu")
    with device.Device():
        found, seen, updates = train(fleet, scenario, "cuda")
    device.forget()
    return {
        "error": (found - expected).abs().max().item(), "updates": updates, "streams": len(seen.streams),
        "reads": seen.reads, "sends": seen.sends, "queued": seen.queued,
    }  # fmt: skip


def ranks_on_the_device():
    """gloo instead of NCCL; and DDP's buckets are filled after backward, because its C++ code needs addresses."""
    import fleetx.engine.engine as engine
    from fleetx.engine.late_reducer import LateReducer
    from fleetx.engine.reducer import Reducer

    class AfterBackward(LateReducer):
        ddp = None

        def __init__(self, model, names, world, reduce, gradients, *, bucket_cap_mb, find_unused_parameters, within):
            super().__init__(names, world, bucket_cap_mb)
            self._act = reduce
            world.broadcast([p.detach() for p in names])

        def active(self):
            return device.contextmanager(lambda: iter([None]))()

        def after_forward(self, out, *, communicate):
            return out

        def agree(self):
            """Which parameters are trained is looked up at every reduction."""

        def begin_backward(self):
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(self._after_backward)

        def _after_backward(self):
            with device.Device(), torch.no_grad():
                self._reduce_all([p for p in self._names if p.grad is not None], self._reduce)

        def _reduce(self, bucket):
            if self._act is not None:
                return self._act(bucket)
            self._world.sum(bucket.buffer.div_(self._world.size))
            done = torch.futures.Future(devices=[bucket.buffer.device])
            done.set_result(bucket.buffer)
            return done

    def made(net, names, world, *args, **kwargs):
        return (AfterBackward if world.device.type == "cuda" else Reducer)(net, names, world, *args, **kwargs)

    engine.Reducer = made
    plain = dist.all_reduce

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        """Its future has our tensor; gloo's has the one that it was given."""
        if not async_op or not isinstance(tensor, device.CudaTensor):
            return plain(tensor, op, group, async_op)
        plain(tensor, op, group)
        done = torch.futures.Future(devices=[tensor.device])
        done.set_result([tensor])
        return type("Work", (), {"get_future": lambda self: done, "wait": lambda self: True})()

    dist.all_reduce = all_reduce


def main(what, out):
    warnings.simplefilter("error")
    from fleetx import fleet

    torch.set_num_threads(1)
    if what == "ranks":
        dist.init_process_group("gloo")
        ranks_on_the_device()
    found = {}
    for scenario in ALONE if what == "alone" else TWO_RANKS:
        try:
            found[scenario.name] = compare(fleet, scenario)
        except Exception:
            found[scenario.name] = {"failed": traceback.format_exc()}
            if what == "ranks":
                break  # the other rank waits for this one
    os.environ["FLEETX_DEVICE"] = "cuda"
    from cuda_around import AROUND, ON_TWO

    around = AROUND if what == "alone" else ON_TWO
    if len(found) == len(ALONE if what == "alone" else TWO_RANKS):
        for name, function in around.items():
            try:
                with device.Device():
                    function(fleet)
                found[f"around: {name}"] = {}
            except Exception:
                found[f"around: {name}"] = {"failed": traceback.format_exc()}
    with open(out, "w") as file:
        json.dump(found, file)
    os._exit(0)  # without the tidy end of a process group whose other rank may have failed
