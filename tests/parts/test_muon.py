from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from fleetx import StrategyError, fleet
from fleetx.optim import Muon, adamw_names
from fleetx.verify import oracle
from training import adam, adamw, assert_close, batches, big, net, share, train, train_fleet, weights, zero_last

PLAIN = {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "rms": 0.2}


def alone(model):
    return Muon(model.named_parameters(), lr=0.01, weight_decay=0.01, adamw=adamw_names(model))


def expected(data, model=None):
    """One plain process in float64."""
    return oracle.train(model or net(), adamw, {"muon": PLAIN}, data, mse_loss, 1)


def uneven():
    """Seven rows do not divide; two rows leave shards of [1, n]; three ranks of four get none of them."""
    torch.manual_seed(0)
    sizes = [6, 7, 2, 5, 3]
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes)]
    return nn.Sequential(*layers)


def convolutions():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.Conv1d(4, 5, 3), nn.Flatten(), nn.Linear(10, 3)
    )


def train_double(declared, make=net, data=None):
    """Whole parameters after training in float64."""
    fleet.init()
    model = make().double()
    model, o = fleet.distribute(model, adamw(model), fleet.DistributedStrategy(**declared))
    alike = "pipeline" in declared  # both ranks are one replica
    rank, size = (0, 1) if alike else (fleet.worker_index(), fleet.worker_num())
    for x, y in share(data or batches(), rank, size):
        if "pipeline" in declared:
            fleet.forward_backward(x.double(), y.double(), loss_fn=mse_loss)
        else:
            mse_loss(model(x.double()), y.double()).backward()
        o.step()
        o.zero_grad()
    found = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in weights(model).items()}
    return {k: v for k, v in found.items() if not v.is_meta}


def assert_exact(got, want):
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [net, uneven, convolutions])
def test_the_strategy_turns_adamw_into_muon(make):
    assert_exact(train_double({"muon": True}, make), expected(batches(), make()))


def test_the_optimizer_works_alone():
    assert_close(train(batches(), optimizer=alone), {k: v.float() for k, v in expected(batches()).items()})


def test_merged_gradients_count_as_their_mean():
    data = batches()
    assert_exact(train_double({"muon": True, "gradient_merge": {"k_steps": 4}}), expected(big(data, 4)))


SPLITS = [
    {},
    {"gradient_merge": {"k_steps": 2}},
    {"sharding": {"stage": 1}},
    {"sharding": {"stage": 3}},
    {"sharding": {"stage": 3}, "gradient_merge": {"k_steps": 2}},
]


@pytest.mark.parametrize("make", [uneven, convolutions])
@pytest.mark.parametrize("declared", SPLITS, ids=lambda declared: "-".join(declared) or "data parallel")
def test_ranks_that_divide_the_work_equal_one(declared, make, ranks):
    data = big(batches(), 2) if "gradient_merge" in declared else batches()
    for got in ranks.run(train_double, {"muon": True, **declared}, make):
        assert_exact(got, expected(data, make()))


@pytest.mark.slow
@pytest.mark.parametrize("declared", [SPLITS[0], SPLITS[3]], ids=["data parallel", "sharding"])
def test_four_ranks_equal_one(declared, four):
    for got in four.run(train_double, {"muon": True, **declared}, uneven):
        assert_exact(got, expected(batches(), uneven()))


def test_two_stages_equal_one(ranks):
    declared = {"muon": True, "pipeline": {"micro_batch": 2, "stages": ["2"]}}
    for got in ranks.run(train_double, declared, uneven):
        assert_exact(got, expected(batches(), uneven()))


def counted(declared):
    """How many matrices this rank makes orthogonal in one step."""
    from fleetx.optim import orthogonal

    calls = []
    plain = orthogonal.newton_schulz
    orthogonal.newton_schulz = lambda matrix, steps: (calls.append(matrix.shape), plain(matrix, steps))[1]
    try:
        train_double(declared, uneven, batches(1))
    finally:
        orthogonal.newton_schulz = plain
    return len(calls)


def test_each_matrix_is_made_orthogonal_on_one_rank(ranks):
    matrices = 3  # of four; the last one is the output
    for declared in ({}, {"sharding": {"stage": 3}}):
        assert sum(ranks.run(counted, {"muon": True, **declared})) == matrices
    assert ranks.run(counted, {"muon": {"divide": False}}) == [matrices, matrices]
    assert ranks.run(counted, {"muon": True, "localsgd": {"k_steps": 2}}) == [matrices, matrices]


class Language(nn.Module):
    def __init__(self, tied: bool):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.position_embed = nn.Parameter(torch.zeros(4, 6))
        self.block = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.block(self.embedding(x) + self.position_embed))


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_and_the_output_stay_with_adamw(tied):
    assert adamw_names(Language(tied)) == ["embedding.weight", *([] if tied else ["head.weight"]), "position_embed"]


def test_patterns_change_the_choice_and_explain_shows_it():
    fleet.init()
    model = Language(tied=False)
    settings = {"adamw": ["linear1"], "muon": ["head"]}
    model, o = fleet.distribute(model, adamw(model), fleet.DistributedStrategy(muon=settings))
    cross_entropy(model(torch.arange(8).view(2, 4)).flatten(0, 1), torch.arange(8)).backward()
    o.step()
    names = {p: name for name, p in model.named_parameters()}
    orthogonal = {names[p] for p, state in o.state.items() if "momentum_buffer" in state}
    assert orthogonal == {f"block.{n}.weight" for n in ("self_attn.out_proj", "linear2")} | {
        "block.self_attn.in_proj_weight", "head.weight"
    }  # fmt: skip
    assert "Muon updates 4 matrices" in str(fleet.explain())
    assert "block.linear1.weight, embedding.weight, position_embed" in str(fleet.explain())


def test_a_run_of_adamw_passes_on_its_first_moment():
    model = net()
    o = adamw(model)
    zero_last(model, o, *batches()[0])
    first = o.state[model[0].weight]["exp_avg"].clone()
    fleet.init()
    model, o = fleet.distribute(model, o, fleet.DistributedStrategy(muon={"momentum": 0.5}))
    x, y = batches()[1]
    mse_loss(model(x), y).backward()
    grad = model[0].weight.grad.clone()
    o.step()
    assert torch.equal(o.state[model[0].weight]["momentum_buffer"], first.lerp(grad, 0.5))
    assert o.state[model[0].weight].keys() == {"momentum_buffer"}


def test_after_release_adamw_trains_on():
    fleet.init()
    model = net()
    model, o = fleet.distribute(model, adamw(model), fleet.DistributedStrategy(muon=True))
    zero_last(model, o, *batches()[0])
    model, o = fleet.release(model)
    assert type(o) is torch.optim.AdamW
    zero_last(model, o, *batches()[1])


def test_the_step_is_as_large_as_adamws():
    def size(optimizer):
        model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 48), nn.Tanh(), nn.Linear(48, 3))
        before = model[2].weight.detach().clone()
        o = optimizer(model)
        mse_loss(model(torch.randn(32, 64)), torch.randn(32, 3)).backward()
        o.step()
        return (model[2].weight - before).square().mean().sqrt().item() / 0.01

    torch.manual_seed(0)
    assert size(alone) == pytest.approx(0.2, rel=0.3)
    assert size(adamw) == pytest.approx(1.0, rel=0.1)  # its first step; later ones are about 0.2


@pytest.mark.parametrize(
    ("settings", "optimizer", "message"),
    [
        ({"adamw": ["nothing"]}, adamw, r"'nothing' in muon_configs\['adamw'\] matches no parameter name"),
        ({"muon": ["nothing"]}, adamw, r"'nothing' in muon_configs\['muon'\] matches no parameter name"),
        ({}, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), "muon needs torch.optim.AdamW, not SGD"),
        ({}, lambda m: torch.optim.Adam(m.parameters(), weight_decay=0.1), "as AdamW does, not as Adam"),
        ({}, lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True), "muon with amsgrad is not supported yet"),
        (
            {},
            lambda m: torch.optim.Adam(m.parameters(), amsgrad=True, weight_decay=0.1),
            "pass amsgrad=False\n.*: pass torch.optim.AdamW",  # not "to Adam"
        ),
    ],
)
def test_what_cannot_work_is_an_error(settings, optimizer, message):
    fleet.init()
    model = net()
    with pytest.raises(StrategyError, match=message):
        fleet.distribute(model, optimizer(model), fleet.DistributedStrategy(muon=settings or True))


@pytest.mark.parametrize("option", [{"ns_steps": 0}, {"momentum": 1.0}, {"rms": 0.0}, {"betas": (0.9, 1.0)}])
def test_options_out_of_range_are_errors(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        Muon(net().parameters(), **option)


def test_the_neutral_setting_keeps_adam_too():
    declared = {"muon": {"adamw": ["weight", "bias"]}}
    assert_close(train_fleet(batches(), declared, optimizer=adam), train(batches(), optimizer=adam))
