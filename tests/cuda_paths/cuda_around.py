"""What surrounds a step on the device of cuda_device.py. Each returns nothing, or raises."""

from __future__ import annotations

import cuda_device as device
import torch
from cuda_child import model, step


def started(fleet, **declared):
    from fleetx.comm import session

    session.reset()
    fleet.init(checks=fleet.Checks(same_parameters=0))
    net = model().to(fleet.device())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return fleet.distribute(net, optimizer, fleet.DistributedStrategy(**declared))


def loader(fleet):
    """Pinned batches are handed over without waiting."""
    import numpy as np

    from fleetx.data.arrays import ArraySource
    from fleetx.data.loader import Loader
    from fleetx.data.sharding_plan import MaxSamples

    started(fleet)
    pixels, labels = np.arange(8 * 16, dtype=np.uint8).reshape(8, 1, 4, 4), np.arange(8)
    batches = Loader(ArraySource(pixels, labels, 0.0, 255.0), MaxSamples(4), shuffle=False, pin_memory=True)
    with device.accounts() as seen:
        for batch in batches:
            for t in batch.values():
                assert t.is_pinned()
                assert t.to(fleet.device(), non_blocking=True).device == device.CUDA
    assert not seen.waits
    assert seen.queued
    with device.accounts() as seen:
        torch.ones(4).to(fleet.device(), non_blocking=True)  # not pinned, so the host waits whatever it is told
    assert seen.waits == 1


def overflow(fleet):
    """A float16 overflow skips its update and halves the scale, with one read."""
    net, optimizer = started(fleet, amp={"init_loss_scaling": 2.0**15, "decr_every_n_nan_or_inf": 1, "decr_ratio": 0.5})
    step(fleet, net, optimizer, torch.randn(8, 128).to(fleet.device()))
    before = [p.detach().clone() for p in net.parameters()]
    x = torch.full((8, 128), float("inf")).to(fleet.device())
    with device.accounts() as seen:
        step(fleet, net, optimizer, x)
    assert not fleet.updated
    assert seen.waits == 1
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
    assert optimizer.state_dict()["fleetx"]["parts"]["AMP"]["scale"] == 2.0**14


def comparison(fleet):
    """Comparing the parameters of the ranks reads once, not once per parameter."""
    from fleetx.comm.session import current
    from fleetx.engine.numbers import compare

    net, _ = started(fleet)
    names = {p: n for n, p in net.named_parameters()}
    with device.accounts() as seen:
        compare(names, names, current().here(), round=1, loaded=False)
    assert seen.waits == 1


def weights(fleet):
    """`fleet.weight` of a tensor on the device."""
    net, optimizer = started(fleet, gradient_merge={"k_steps": 2})
    for n in (3, 5):
        fleet.weight(torch.tensor(n, device=fleet.device()))
        step(fleet, net, optimizer, torch.randn(8, 128).to(fleet.device()))
    assert fleet.updated


def checkpoint(fleet):
    """What is saved on the device is the same after it was loaded."""
    import tempfile

    net, optimizer = started(fleet, amp=True)
    step(fleet, net, optimizer, torch.randn(8, 128).to(fleet.device()))
    saved = [p.detach().clone() for p in net.parameters()]
    with tempfile.TemporaryDirectory() as folder:
        fleet.save(f"{folder}/1")
        step(fleet, net, optimizer, torch.randn(8, 128).to(fleet.device()))
        fleet.load(f"{folder}/1")
    assert all(p.device == device.CUDA and torch.equal(p, s) for p, s in zip(net.parameters(), saved, strict=True))


def different_batches(fleet):
    """On two ranks: a pipeline whose ranks got different batches says so before the update."""
    from cuda_scenarios import PIPELINE

    from fleetx import UsageError

    net, optimizer = started(fleet, pipeline=PIPELINE)
    for i, share in enumerate((0, 0, fleet.worker_index())):
        x = torch.full((8, 128), float(share)).to(fleet.device())
        before = [p.detach().clone() for p in net.parameters() if not p.is_meta]
        with device.accounts() as seen:
            fleet.forward_backward(x, x, loss_fn=lambda out, _: out.square().mean())
        assert i == 0 or not seen.waits, seen.reads  # the first batch shows how the model is cut
        try:
            optimizer.step()
        except UsageError as error:
            if "got different batches" not in str(error):
                raise
            held = [p for p in net.parameters() if not p.is_meta]
            assert all(torch.equal(p, b) for p, b in zip(held, before, strict=True))
            assert i == 2
            return
        optimizer.zero_grad()
    raise AssertionError("nothing was said")


def different_shapes(fleet):
    """On two ranks: one of them alone changes the shape of its batch, and both say so before the schedule begins."""
    from cuda_scenarios import PIPELINE

    from fleetx import UsageError

    started(fleet, pipeline=PIPELINE)
    for size in (8, 8, 8 + 8 * fleet.worker_index()):
        x = torch.ones(size, 128).to(fleet.device())
        try:
            fleet.forward_backward(x, x, loss_fn=lambda out, _: out.square().mean())
        except UsageError as error:
            if "got different batches" not in str(error):
                raise
            return
    raise AssertionError("nothing was said")


AROUND = {f.__name__: f for f in (loader, overflow, comparison, weights, checkpoint)}
ON_TWO = {f.__name__: f for f in (different_batches, different_shapes)}
