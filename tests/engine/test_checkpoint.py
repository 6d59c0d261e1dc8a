"""`fleet.save` and `fleet.load`: from any layout to any other, and bit for bit to the same."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

from fleetx import CheckpointError, UsageError, fleet
from fleetx.comm.session import current
from training import adamw

STEPS = 6


def deep():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 6), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(6, 3)).eval()  # statistics would differ between micro-batches


LAYOUTS = {
    "plain": {},
    "two stages": {"pipeline": {"stages": ["2"], "micro_batch": 2}},
    "four stages": {"pipeline": {"stages": ["1", "2", "3"], "micro_batch": 2, "schedule_mode": "ZBVZeroBubble"}},
    "two shards": {"sharding": {"sharding_degree": 2, "stage": 3}},
}


def data():
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=g), torch.randn(8, 3, generator=g)) for _ in range(STEPS)]


def build(declared):
    fleet.init()
    model = deep()
    return fleet.distribute(model, adamw(model), fleet.DistributedStrategy(**declared))


def steps(optimizer, batches):
    for x, y in batches:
        n, i = fleet.replica_num(), fleet.replica_index()
        fleet.forward_backward(x.chunk(n)[i], y.chunk(n)[i], loss_fn=mse_loss)
        optimizer.step()
        optimizer.zero_grad()


def held(model):
    state = model.state_dict()
    return {k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in state.items()}


def write(declared, folder, first=4):
    model, optimizer = build(declared)
    steps(optimizer, data()[:first])
    fleet.save(folder)
    steps(optimizer, data()[first:])
    return held(model)


def go_on(declared, folder, first=4):
    model, optimizer = build(declared)
    fleet.load(folder)
    steps(optimizer, data()[first:])
    return held(model)


def joined(results):
    whole = {}
    for found in results:
        whole |= found
    return whole


ON_FOUR = {
    "four stages": {"pipeline": {"stages": ["1", "2", "3"], "micro_batch": 4}},
    "two pipelines": {"pipeline": {"stages": ["2"], "micro_batch": 2}},
    "four shards": {"sharding": {"sharding_degree": 4, "stage": 3}},
    "two times two shards": {"sharding": {"sharding_degree": 2, "stage": 2, "hybrid_dp": True}},
}


@pytest.fixture(scope="module")
def written(ranks, four, tmp_path_factory):
    """written(ranks, layout): a checkpoint, and the parameters at the end of the run that wrote it in the middle."""
    pools = {2: (ranks, LAYOUTS), 4: (four, ON_FOUR)}

    @cache
    def once(size, layout):
        pool, layouts = pools[size]
        folder = str(tmp_path_factory.mktemp("written") / "checkpoint")
        return folder, joined(pool.run(write, layouts[layout], folder))

    return once


@pytest.mark.parametrize(("before", "after"), list(itertools.product(LAYOUTS, repeat=2)))
def test_from_any_layout_to_any_other(ranks, written, before, after):
    folder, want = written(2, before)
    found = joined(ranks.run(go_on, LAYOUTS[after], folder))
    assert found.keys() == want.keys()
    if before == after:
        torch.testing.assert_close(found, want, rtol=0, atol=0)
    else:
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(ON_FOUR, ["two stages", "two shards"])))
def test_from_four_ranks_to_two_and_back(ranks, four, written, before, after):
    there, want = written(4, before)
    found = joined(ranks.run(go_on, LAYOUTS[after], there))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    back, _ = written(2, after)
    torch.testing.assert_close(joined(four.run(go_on, ON_FOUR[before], back)), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("before", LAYOUTS)
def test_to_a_single_process(written, before):
    folder, want = written(2, before)
    torch.testing.assert_close(go_on({}, folder), want, rtol=1e-4, atol=1e-5)


def test_from_a_single_process(ranks, tmp_path):
    folder = str(tmp_path / "checkpoint")
    want = write({}, folder)
    found = joined(ranks.run(go_on, LAYOUTS["two stages"], folder))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


MERGED = {"gradient_merge": {"k_steps": 3}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inside_of_a_merge_window_the_same_layout_goes_on_bit_for_bit(ranks, tmp_path, layout):
    folder = str(tmp_path / "checkpoint")
    declared = LAYOUTS[layout] | MERGED
    want = ranks.run(write, declared, folder)
    for a, b in zip(ranks.run(go_on, declared, folder), want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def problem(declared, folder):
    try:
        go_on(declared, folder)
    except UsageError as error:
        return str(error)
    return "nothing was said"


def test_inside_of_a_merge_window_another_layout_is_told_to_flush(ranks, tmp_path):
    folder = str(tmp_path / "checkpoint")
    ranks.run(write, LAYOUTS["two stages"] | MERGED, folder)
    for text in ranks.run(problem, MERGED, folder):
        assert "Call fleet.flush() before saving" in text
    for text in ranks.run(problem, {"sharding": True} | MERGED, folder):
        assert "Call fleet.flush() before saving" in text


def test_what_is_no_checkpoint_is_said(tmp_path):
    build({})
    with pytest.raises(CheckpointError, match=r"nowhere: cannot be read: No such file"):
        fleet.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty: has no manifest.json, so it is not a checkpoint of fleet.save"):
        fleet.load(tmp_path / "empty")
    (tmp_path / "empty" / "fleetx.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"empty: was written by an older fleetx"):
        fleet.load(tmp_path / "empty")


def test_a_checkpoint_of_another_model_is_said(tmp_path):
    write({}, tmp_path / "one")
    current().entries.clear()
    model = nn.Linear(6, 3)
    fleet.distribute(model, adamw(model))
    with pytest.raises(UsageError, match="is it from another"):
        fleet.load(tmp_path / "one")


def test_saving_again_replaces(tmp_path):
    _, optimizer = build({})
    for n in range(2):
        steps(optimizer, data()[n : n + 1])
        fleet.save(tmp_path / "one")
    assert [p.name for p in tmp_path.iterdir()] == ["one"]


class Counting(torch.optim.SGD):
    """Keeps a plain number for each parameter, as some optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1
        return super().step(closure)


def test_numbers_in_the_state_of_the_optimizer_are_kept(tmp_path):
    fleet.init()
    for n in range(2):
        model = nn.Linear(6, 3)
        current().entries.clear()
        model, optimizer = fleet.distribute(model, Counting(model.parameters(), lr=0.1))
        if n:
            fleet.load(tmp_path / "one")
            assert {s["count"] for s in optimizer.state.values()} == {2}
        else:
            steps(optimizer, [(x, y) for x, y in data()[:2]])
            fleet.save(tmp_path / "one")


def images(folder):
    """Train a convolution whose weights are in channels_last, over three steps of a merge window of two."""
    fleet.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, (1, 3)), nn.Flatten(), nn.Linear(36, 2)).to(memory_format=torch.channels_last)
    model, optimizer = fleet.distribute(model, adamw(model), fleet.DistributedStrategy(gradient_merge={"k_steps": 2}))
    for n, x in enumerate(torch.randn(4, 3, 2, 4, 5, generator=torch.Generator().manual_seed(1))):
        if n == 3 and folder is not None:
            fleet.save(folder)
            fleet.load(folder)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_a_window_of_gradients_in_channels_last_is_resumed(tmp_path):
    expected = images(None)
    fleet.release()
    for name, value in images(tmp_path / "one").items():
        assert torch.equal(value, expected[name])
