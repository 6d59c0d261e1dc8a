"""The ways to the other ranks, on four of them."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fleetx
from fleetx import StrategyError, fleet
from fleetx.base.worker_thread import WorkerThread
from fleetx.comm import paths
from fleetx.comm.paths import FlatPath, Traffic, inside_hosts
from fleetx.comm.roles import ProcessInfo
from fleetx.comm.world import World
from training import adam, assert_close, batches, big, net, train, train_fleet

WAYS = {
    "hierarchical": {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 2},
    "one group": {"use_hierarchical_allreduce": True},
    "three communicators": {"nccl_comm_num": 3},
    "both": {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 2, "nccl_comm_num": 2},
}
small = {"fuse_grad_size_in_MB": 0.0002}  # several buckets


@pytest.mark.parametrize("way", WAYS)
def test_every_way_equals_the_flat_one(four, way):
    data = batches(8, size=8)
    expected = train(data)
    for got in four.run(train_fleet, data, WAYS[way] | small):
        assert_close(got, expected)


def hierarchy():
    """A model and its network: who drops the model ends the network."""
    fleet.init()
    model = net()
    model, _ = fleet.distribute(model, adam(model), fleet.DistributedStrategy(**WAYS["hierarchical"]))
    return model, fleet._engine(model).network


def passed_through():
    """A last piece that is reduced only once the first was broadcast. In time?"""
    _model, network = hierarchy()
    reduce, broadcast, back, seen = dist.reduce, dist.broadcast, threading.Event(), []

    def late(buffer, **others):
        if buffer.numel() == 3:
            seen.append(back.wait(60))
        return reduce(buffer, **others)

    def noted(buffer, **others):
        broadcast(buffer, **others)
        back.set()

    buffer = torch.arange(11.0) * (fleet.worker_index() + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "PIECE_BYTES", 16)
        patch.setattr(dist, "reduce", late)
        patch.setattr(dist, "broadcast", noted)
        summed = network.sum(buffer).wait()
    assert summed is buffer
    return seen, buffer.tolist()


def test_a_piece_is_back_before_the_last_one_has_left(four):
    expected = [10.0 * i for i in range(11)]
    assert four.run(passed_through) == [([True], expected)] * 4


def lost_piece():
    _model, network = hierarchy()
    reduce = dist.reduce

    def fails(buffer, **others):
        if buffer[0] == 4:
            raise RuntimeError("the second is lost")
        return reduce(buffer, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "PIECE_BYTES", 16)
        patch.setattr(dist, "reduce", fails)
        with pytest.raises(RuntimeError, match="the second is lost"):
            network.sum(torch.arange(11.0)).wait()
    return True


def test_the_error_of_a_piece_is_that_of_its_buffer(four):
    assert all(four.run(lost_piece))


def in_pieces(data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "PIECE_BYTES", 36)
        return train_fleet(data, WAYS["hierarchical"])


def test_pieces_equal_the_flat_sum(four):
    data = batches(8, size=8)
    for got in four.run(in_pieces, data):
        assert_close(got, train(data))


@pytest.mark.parametrize("way", WAYS)
def test_merged_and_with_clip_and_amp(four, way):
    data = batches(8, size=8)
    declared = {"gradient_merge": {"k_steps": 2}, "clip": {"clip_norm": 0.5}}
    expected = train_fleet(big(data, 2), {"clip": {"clip_norm": 0.5}})
    for got in four.run(train_fleet, data, WAYS[way] | declared | small):
        assert_close(got, expected)


def wide():
    """One tensor that DGC compresses, and small ones."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(160, 128), nn.Tanh(), nn.Linear(128, 3))


def compressed(declared, sparsity):
    g = torch.Generator().manual_seed(1)
    data = [(torch.randn(8, 160, generator=g), torch.randn(8, 3, generator=g)) for _ in range(6)]
    return train_fleet(data, {"dgc": {"sparsity": [sparsity]}} | declared, make=wide, optimizer=momentum)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("sparsity", [0.0, 0.99])
@pytest.mark.parametrize("way", WAYS)
def test_dgc_along_every_way(four, way, sparsity):
    flat = four.run(compressed, {}, sparsity)
    for got in four.run(compressed, WAYS[way] | small, sparsity):
        assert_close(got, flat[0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("way", [{}, WAYS["both"]], ids=["flat", "both"])
def test_half_precision_on_the_wire_to_its_rounding(four, dtype, way):
    data = batches(8, size=8)
    expected = train(data)
    rtol = {"float16": 2e-3, "bfloat16": 2e-2}[dtype]
    results = four.run(train_fleet, data, way | small | {"fp16_allreduce": {"dtype": dtype}})
    for got in results:
        torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol)
        torch.testing.assert_close(got, results[0], rtol=0, atol=0)


def gathered(way):
    fleet.init()
    model = net()
    model, _ = fleet.distribute(model, adam(model), fleet.DistributedStrategy(**way))
    network = fleet._engine(model).network
    if not network.messages:
        network._paths = []
        network.messages = True
        network.open()
    message = torch.arange(fleet.worker_index() * 3, dtype=torch.uint8)  # rank 0 has nothing to say
    return [m.tolist() for m in network.path(0).gather(message)]


@pytest.mark.parametrize("way", [{}, WAYS["hierarchical"]], ids=["flat", "hierarchical"])
def test_messages_of_unequal_length_reach_everyone(four, way):
    expected = [list(range(3 * rank)) for rank in range(4)]
    assert four.run(gathered, way) == [expected] * 4


def misfit(inside):
    fleet.init()
    strategy = fleet.DistributedStrategy(use_hierarchical_allreduce=True, hierarchical_allreduce_inter_nranks=inside)
    model = net()
    with pytest.raises(StrategyError, match="= 3 does not divide 4 ranks: use 2 or 4"):
        fleet.distribute(model, adam(model), strategy)
    return True


def test_groups_that_do_not_divide(four):
    assert all(four.run(misfit, 3))


@pytest.mark.parametrize(
    ("hosts", "size"),
    [
        ("aabb", 2),
        ("abc", 1),
        ("aa", 2),
        ("aab", 0),
        ("abab", 0),
        ("aabbaa", 0),
    ],
    ids=str,
)
def test_groups_are_hosts(hosts, size):
    assert inside_hosts(hosts) == size


def test_a_worker_thread_keeps_the_order_and_passes_errors_on():
    thread = WorkerThread("test", torch.device("cpu"))
    seen = []
    futures = [thread.submit(lambda i=i: seen.append(i) or i) for i in range(100)]
    assert [f.wait() for f in futures] == seen == list(range(100))
    with pytest.raises(Exception, match="lost"):
        thread.submit(lambda: (_ for _ in ()).throw(ValueError("lost"))).wait()
    assert thread.submit(lambda: 7).wait() == 7


def test_callbacks_of_a_collective_refer_to_tensors_alone():
    """gloo frees them on a thread of the process group, which would wait for itself if they kept the group alive."""
    found = {}
    for path in Path(fleetx.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "then"
            if called and isinstance(node.args[0], ast.Lambda):
                own = {argument.arg for argument in node.args[0].args.args}
                names = [n for n in ast.walk(node.args[0].body) if isinstance(n, ast.Name)]
                own |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
                found[f"{path.name}:{node.lineno}"] = {n.id for n in names} - own
            elif called and path.name != "numbers.py":  # there it is called with an answer
                found[f"{path.name}:{node.lineno}"] = {ast.unparse(node.args[0])}
    assert len(found) == 3
    assert set().union(*found.values()) <= {"buffer", "sums"}, found


class Late:
    """A collective that takes a while."""

    def __init__(self):
        self.asked = 0

    def done(self):
        self.asked += 1
        return self.asked > 3


def test_closing_a_path_waits_for_what_is_under_way():
    world = World(ProcessInfo(), torch.device("cpu"))
    path = FlatPath(world, None, None, Traffic())
    late = Late()
    path._pending = [late]
    path.close()
    assert late.asked > 3
