"""`fleet.metrics` and `fleet.all_reduce`: numbers of all ranks, exactly, in one collective."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from fleetx import fleet
from fleetx.errors import UsageError
from rank_pool import RankError

BIG = 2**62 + 1  # no float64 has it


def test_one_process_gets_its_own_numbers_back():
    fleet.init()
    value = {"loss": 0.1, "n": 3, "ok": True, "t": torch.tensor([1.5, 2.5]), "deep": [np.int64(7), (2.0,)]}
    for reduce in (fleet.metrics.sum, fleet.metrics.max, fleet.metrics.min):
        found = reduce(value)
        assert torch.equal(found.pop("t"), value["t"])
        assert found == {k: v for k, v in value.items() if k != "t"}
    assert fleet.metrics.mean({"n": 3})["n"] == 3.0
    assert fleet.metrics.gather(5) == [5]
    assert fleet.all_reduce(np.array([1, 2])).tolist() == [1, 2]


class Counts(NamedTuple):
    right: int
    loss: float


def test_the_result_has_the_form_of_the_value():
    fleet.init()
    assert fleet.metrics.mean(Counts(2, 0.5)) == Counts(2.0, 0.5)
    assert fleet.metrics.sum(torch.Size([2, 3])) == (2, 3)


def _of_nothing():
    join()
    return fleet.metrics.gather([]), fleet.metrics.gather(torch.zeros(0, 2)), fleet.metrics.sum({})


def test_a_gather_of_nothing_has_an_entry_for_each_rank(ranks):
    for empty, tensors, total in ranks.run(_of_nothing):
        assert empty == [[], []]
        assert [t.shape for t in tensors] == [(0, 2)] * 2
        assert total == {}


def join():
    fleet.init()
    fleet.barrier_worker()  # what ranks of an earlier test wrote is out of date


def _numbers():
    join()
    r = fleet.worker_index()
    calls = []
    plain = dist.all_gather_single
    dist.all_gather_single = lambda *a, **k: calls.append(1) or plain(*a, **k)
    value = {
        "f": [0.1, 0.2][r], "big": [BIG, -1][r], "nan": [1.0, math.nan][r], "flag": r == 0,
        "half": torch.tensor([1.0, r], dtype=torch.bfloat16), "bytes": torch.tensor([200, r], dtype=torch.uint8),
        "double": torch.tensor([[1e-300, 1 / 3]], dtype=torch.float64) * (r + 1), "none": torch.empty(0),
        "grad": torch.tensor(1.0 + r, requires_grad=True),
    }  # fmt: skip
    m = fleet.metrics
    found = [m.sum(value), m.mean(value), m.max(value), m.min(value)]
    found += [m.gather({"x": r, "t": torch.tensor([r, r])}), fleet.all_reduce(np.array([r, 2.5]), "max")]
    dist.all_gather_single = plain
    return found, len(calls)


def test_two_ranks_reduce_everything_exactly_in_one_collective(ranks):
    for (total, mean, most, least, every, array), calls in ranks.run(_numbers):
        assert calls == 6
        assert (total["f"], total["big"], total["flag"]) == (0.1 + 0.2, BIG - 1, 1)
        assert math.isnan(total["nan"])
        assert torch.equal(total["half"], torch.tensor([2.0, 1.0], dtype=torch.bfloat16))
        assert torch.equal(total["bytes"], torch.tensor([400, 1]))
        assert torch.equal(total["double"], torch.tensor([[1e-300, 1 / 3]], dtype=torch.float64) * 3)
        assert total["none"].shape == (0,)
        assert not total["grad"].requires_grad
        assert total["grad"] == 3
        assert (mean["f"], mean["big"], mean["flag"]) == ((0.1 + 0.2) / 2, (BIG - 1) / 2, 0.5)
        assert torch.equal(mean["bytes"], torch.tensor([200, 0.5], dtype=torch.float64))
        assert (most["f"], most["big"], most["flag"], least["flag"]) == (0.2, BIG, True, False)
        assert math.isnan(most["nan"])
        assert math.isnan(least["nan"])
        assert torch.equal(most["bytes"], torch.tensor([200, 1], dtype=torch.uint8))
        assert [row["x"] for row in every] == [0, 1]
        assert [row["t"].tolist() for row in every] == [[0, 0], [1, 1]]
        assert array.tolist() == [1.0, 2.5]


def _in_pieces():
    from fleetx.fleet import reductions

    join()
    r, kept = fleet.worker_index(), reductions._AT_ONCE
    reductions._AT_ONCE = 6  # three numbers of each rank
    try:
        value = {"a": torch.arange(5) + r, "b": torch.arange(4) / 2 + r}
        return fleet.metrics.sum(value), fleet.metrics.gather(value)[1]
    finally:
        reductions._AT_ONCE = kept


def test_large_tensors_go_in_pieces(ranks):
    total, second = ranks.run(_in_pieces)[0]
    assert total["a"].tolist() == [1, 3, 5, 7, 9]
    assert total["b"].tolist() == [1, 2, 3, 4]
    assert second["b"].tolist() == [1, 1.5, 2, 2.5]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"x": "1"}, "x: a str is not a number"),
        (2**70, "does not fit into 64 bits"),
        (torch.tensor(1j), "pass real numbers"),
    ],
)
def test_what_is_no_number_is_refused(value, says):
    fleet.init()
    with pytest.raises((UsageError, TypeError), match=says):
        fleet.metrics.sum(value)


def test_an_unknown_mode_is_refused():
    fleet.init()
    with pytest.raises(UsageError, match=r"mode='summ': did you mean 'sum'\?"):
        fleet.all_reduce(1, mode="summ")


def _too_large():
    join()
    fleet.metrics.sum(2**62)


def _of_other_form():
    join()
    fleet.metrics.sum({"loss": 1.0} if fleet.worker_index() else {"loss": 1.0, "n": 2})


def _alone():
    fleet.init()
    model = nn.Linear(2, 1)
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        loss = model(torch.ones(1, 2)).sum()
        if fleet.is_first_worker():
            fleet.metrics.mean(loss)
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (_too_large, "does not fit into 64 bits"),
        (
            _of_other_form,
            r"rank \d is in fleet.metrics.sum\(loss: float64.*but rank \d is in fleet.metrics.sum\(loss: ",
        ),
        (_alone, r"rank 0 is in fleet.metrics.mean.*but rank 1"),
    ],
)
def test_ranks_that_do_not_agree_are_told(job, says, ranks):
    with pytest.raises(RankError, match=says):
        ranks.run(job)


def _in_stages():
    fleet.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    strategy = fleet.DistributedStrategy(pipeline={"degree": 2, "micro_batch": 2})
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    replica = fleet.replica_index()
    loss = fleet.forward_backward(torch.ones(2, 4) * replica, torch.zeros(2, 2), loss_fn=mse_loss)
    optimizer.step()
    try:
        fleet.metrics.sum(fleet.worker_index())
    except UsageError as error:
        said = str(error)
    m = fleet.metrics
    return loss.item(), replica, m.mean(loss).item(), m.sum({"n": 10 + replica})["n"], m.max(fleet.worker_index()), said


def test_stages_of_a_pipeline_count_once(four):
    found = four.run(_in_stages)
    losses = {replica: loss for loss, replica, *_ in found}
    for _, _, mean, total, most, said in found:
        assert mean == torch.tensor((losses[0] + losses[1]) / 2, dtype=torch.float32)
        assert (total, most) == (21, 3)
        assert "the ranks of one replica of the model have different numbers" in said
