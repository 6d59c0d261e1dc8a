from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fleetx import fleet
from fleetx.comm import duplex


def noted(call, calls):
    def wrapper(*args, **kwargs):
        calls.append(call.__name__)
        return call(*args, **kwargs)

    return wrapper


def exchanged(length, dtype):
    """What gloo's own collectives make of the same values, and what these make of them, with the order of calls."""
    fleet.init()
    size, rank = dist.get_world_size(), dist.get_rank()
    rows = (torch.arange(size * length) + 1000 * rank).to(dtype).view(size, length)
    expected, got, calls = [], [], []
    for theirs, ours, given in (
        (dist.all_to_all_single, duplex.all_to_all, rows),
        (dist.all_gather_single, duplex.all_gather, rows[rank : rank + 1]),
    ):
        plain = torch.empty(size, length, dtype=dtype)
        theirs(plain, given)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("isend", "irecv"):
                patch.setattr(dist, name, noted(getattr(dist, name), calls))
            got.append(ours(given, None))
        expected.append(plain)
    return expected, got, calls


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
@pytest.mark.parametrize("length", [1, 7, 50_000])
@pytest.mark.parametrize("pool", ["ranks", "four"])
def test_they_do_what_the_collectives_do_and_receive_before_they_send(request, pool, length, dtype):
    size = 2 if pool == "ranks" else 4
    for expected, got, calls in request.getfixturevalue(pool).run(exchanged, length, dtype):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        assert calls == 2 * (["irecv"] * (size - 1) + ["isend"] * (size - 1))
