"""A process group in which every rank is like this one: as many ranks as you like, in one process, with real numbers.

    all_reduce   SUM is size times the value; MAX and MIN are the value
    all_gather   size copies of the value
    broadcast    the value
    reduce_scatter   size times this rank's chunk
    all_to_all   this rank's chunk from each rank, as much of it as is expected from there
    recv         ones: what a neighbour sends is not what this rank would send, and yes if torch's stages vote

So training equals training alone wherever the ranks would hold the same data, and what a rank makes for itself (groups,
layouts, plans, shards) is what it makes in a world of that size. Counts what is communicated.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.futures import Future

calls, numbers, groups = Counter(), Counter(), Counter()  # by collective: calls and elements received; groups by size


def forget():
    for each in (calls, numbers, groups):
        each.clear()


def _done(result):
    future = Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


class Mirror(dist.ProcessGroup):
    def __init__(self, rank, size, name):
        super().__init__(rank, size)
        self._size, self._place, self._name = size, rank, name
        groups[size] += 1

    def size(self):
        return self._size

    def rank(self):
        return self._place

    def getBackendName(self):  # noqa: N802
        return "mirror"

    def _get_backend(self, device):
        """Since 2.15 torch asks it whether it can send several messages as one."""
        return self

    @property
    def group_name(self):
        return self._name

    @property
    def pg_name(self):
        return self.group_name

    def _count(self, name, tensors):
        calls[name] += 1
        numbers[name] += sum(t.numel() for t in tensors)

    def _reduce(self, tensors, op):
        with torch.no_grad():
            for t in tensors if op == ReduceOp.SUM else ():
                t.mul_(self._size)

    def allreduce(self, tensors, opts=None):
        self._count("all_reduce", tensors)
        self._reduce(tensors, opts.reduceOp if opts is not None else ReduceOp.SUM)
        return _done(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors, opts=None):
        self._count("reduce", tensors)
        if opts.rootRank == self._place:
            self._reduce(tensors, opts.reduceOp)
        return _done(tensors)

    def broadcast(self, tensors, opts=None):
        self._count("broadcast", tensors)
        return _done(tensors)

    def allgather(self, outputs, inputs, opts=None):
        for made, given in zip(outputs, inputs, strict=True):
            self._count("all_gather", made)
            for t in made:
                t.copy_(given)
        return _done(outputs)

    def all_gather_single(self, output, given, opts=None):
        self._count("all_gather", [output])
        with torch.no_grad():
            output.view(self._size, -1).copy_(given.reshape(1, -1).expand(self._size, -1))
        return _done(output)

    def reduce_scatter_single(self, output, given, opts=None):
        self._count("reduce_scatter", [output])
        with torch.no_grad():
            output.copy_(given.view(self._size, *output.shape)[self._place])
            self._reduce([output], opts.reduceOp if opts is not None else ReduceOp.SUM)
        return _done(output)

    def all_to_all_single(self, output, given, output_sizes, input_sizes, opts=None):
        self._count("all_to_all", [output])
        with torch.no_grad():
            if not input_sizes:  # equal chunks
                output.view(self._size, -1).copy_(given.view(self._size, -1)[self._place].expand(self._size, -1))
                return _done(output)
            chunk = given.split(input_sizes)[self._place]
            for part in output.split(output_sizes):
                part.copy_(chunk[: len(part)])
        return _done(output)

    # the names before torch 2.13's
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    alltoall_base = all_to_all_single

    def send(self, tensors, to, tag):
        self._count("send", tensors)
        return _done(tensors)

    def recv(self, tensors, source, tag):
        self._count("recv", tensors)
        with torch.no_grad():
            for t in tensors:
                t.fill_(1)
        return _done(tensors)

    def barrier(self, opts=None):
        return _done([])


class MirrorStore(dist.Store):
    """Every rank adds what this one adds."""

    def __init__(self, size):
        super().__init__()
        self._size, self._values = size, {}

    def set(self, key, value):
        self._values[key] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key):
        return self._values[key]

    def add(self, key, number):
        value = int(self._values.get(key, b"0")) + number * self._size
        self._values[key] = str(value).encode()
        return value

    def check(self, keys):
        return all(key in self._values for key in keys)

    def wait(self, keys, timeout=None):
        assert self.check(keys), f"nobody will set {keys}"

    def delete_key(self, key):
        return self._values.pop(key, None) is not None

    deleteKey = delete_key  # noqa: N815


_kept = []


def start(size, rank=0):
    """Become one rank of so many."""

    def made(about, _):
        return Mirror(about.group_rank, about.group_size, about.group_id)

    dist.Backend.register_backend("mirror", made, extended_api=True, devices=["cpu"])
    _kept.append(MirrorStore(size))  # torch alone would keep only the half of it that is C++
    dist.init_process_group("mirror", store=_kept[-1], rank=rank, world_size=size)
