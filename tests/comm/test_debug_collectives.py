"""FLEETX_DEBUG=collectives names calls that would mix up data or abort the process."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from fleetx import UsageError, fleet
from fleetx.comm import debug

MAX = dist.ReduceOp.MAX


def _order(rank):
    a, b = torch.ones(2), torch.ones(2)
    if rank == 0:
        dist.all_reduce(a)
        dist.all_reduce(b)
    else:
        dist.all_reduce(b)
        dist.all_reduce(a)


CASES = {
    "shape": lambda rank: dist.all_reduce(torch.ones(10 + rank)),
    "view": lambda rank: dist.all_reduce(torch.ones((2, 3) if rank else (3, 2))),
    "dtype": lambda rank: dist.all_reduce(torch.ones(4, dtype=[torch.float32, torch.int32][rank])),
    "reduction": lambda rank: dist.all_reduce(torch.ones(4), op=[dist.ReduceOp.SUM, MAX][rank]),
    "kind": lambda rank: [dist.all_reduce, lambda t: dist.broadcast(t, 0)][rank](torch.ones(4)),
    "source": lambda rank: dist.broadcast(torch.ones(4), rank),
    "order": _order,
}


def _mixed_up(name):
    plain = {n: getattr(dist, n) for n in debug.COLLECTIVES}
    os.environ[debug.SWITCH] = "collectives"
    try:
        fleet.init()
        t = torch.ones(3)
        dist.all_reduce(t)  # the same on all ranks
        CASES[name](fleet.worker_index())
    except UsageError as error:
        return t.tolist(), str(error)
    finally:
        del os.environ[debug.SWITCH]
        for n, call in plain.items():
            setattr(dist, n, call)
    return None


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_call_different_collectives_are_named(ranks, name):
    (first, said), (second, also) = ranks.run(_mixed_up, name)
    assert first == second == [2.0, 2.0, 2.0]
    assert said == also
    assert "rank 0: " in said
    assert "rank 1: " in said
    assert "test_debug_collectives.py:" in said


def test_unknown_values_are_refused(monkeypatch):
    monkeypatch.setenv(debug.SWITCH, "everything")
    with pytest.raises(UsageError, match="FLEETX_DEBUG=everything: must be collectives"):
        fleet.init()
