"""Every rank takes over the buffers of rank 0, whatever their memory looks like, and constant ones are sent once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fleetx import UsageError, fleet
from fleetx.base import seams
from training import sgd


class WithBuffers(nn.Module):
    def __init__(self, constant):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("constant", constant)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen.data.add_(x.detach().mean(0))  # through .data: its version counter stays the same
        return self.linear(x)


def big():
    return torch.full((2**19,), 1.0 + fleet.worker_index())  # 2 MiB, of rank 0 everywhere after distribute


def expanded():
    """As in the PositionalEncoding of many examples."""
    return torch.arange(4.0).add(fleet.worker_index()).unsqueeze(0).expand(3, -1)


def overlapping():
    return torch.arange(5.0).add(fleet.worker_index()).as_strided((2, 4), (1, 1))


def turned():
    """As in the PositionalEncoding of pytorch/examples. The only one of its type: torch sends it without a copy."""
    rows = torch.arange(4.0, dtype=torch.float64).add(fleet.worker_index()).repeat(3, 1)
    return rows.unsqueeze(0).transpose(0, 1)  # contiguous, but not with the strides of contiguous()


def trained(make, declared=None, steps=4, change_in=None):
    fleet.init()
    model = WithBuffers(make())
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**(declared or {})))
    start, sent, send = model.constant.clone(), [], seams.broadcast_coalesced
    seams.broadcast_coalesced = lambda group, values, *rest: (
        sent.append(sum(v.nbytes for v in values)),
        send(group, values, *rest),
    )
    try:
        for step in range(steps):
            model(torch.full((2, 4), 1.0 + fleet.worker_index())).sum().backward()
            if step == change_in and fleet.worker_index() == 1:
                model.constant.data.fill_(7.0)  # on one rank only
            optimizer.step()
            optimizer.zero_grad()
        fleet.flush()
    finally:
        seams.broadcast_coalesced = send
    return start, model.constant, model.seen, sent


def test_a_large_constant_buffer_is_sent_once_and_a_changing_one_in_every_round(ranks):
    for start, constant, seen, sent in ranks.run(trained, big):
        assert start.eq(1.0).all()
        assert constant.eq(1.0).all()
        assert seen.eq(4.0).all()  # that of rank 0
        assert sent == [16, 16, 16, 16]  # the large one at set-up


def test_a_buffer_that_one_rank_changes_late_is_that_of_rank_0_again(ranks):
    for _, constant, _, sent in ranks.run(trained, big, {}, 4, 2):
        assert constant.eq(1.0).all()
        assert sent == [16, 16, 2**21 + 16, 2**21 + 16]


@pytest.mark.parametrize("make", [expanded, overlapping])
@pytest.mark.parametrize("declared", [{}, {"localsgd": {"k_steps": 2}}], ids=["plain", "localsgd"])
def test_a_buffer_whose_elements_share_memory_is_sent(ranks, make, declared):
    for start, constant, seen, _ in ranks.run(trained, make, declared):
        assert start[0].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert torch.equal(constant, start)
        assert seen.eq(4.0).all()


@pytest.mark.parametrize("declared", [{}, {"localsgd": {"k_steps": 2}}], ids=["plain", "localsgd"])
def test_a_buffer_with_an_unusual_stride_is_sent(ranks, declared):
    for start, constant, seen, _ in ranks.run(trained, turned, declared):
        assert start[0, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert torch.equal(constant, start)
        assert seen.eq(4.0).all()


def sparse():
    return torch.eye(4).to_sparse()


def refused(make, text):
    with pytest.raises(UsageError, match=text):
        trained(make)


def test_a_buffer_that_cannot_be_sent_is_named_with_the_way_out(ranks):
    ranks.run(refused, sparse, r"buffer 'constant' is sparse, .*broadcast_buffers = False")


@pytest.mark.parametrize("make", [sparse, big])
def test_without_broadcast_each_rank_keeps_its_own_after_set_up(ranks, make):
    found = ranks.run(trained, make, {"broadcast_buffers": False})
    assert [seen.tolist() for _, _, seen, _ in found] == [[4.0] * 4, [8.0] * 4]
    assert [sent for *_, sent in found] == [[], []]
