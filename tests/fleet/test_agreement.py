"""Ranks that would part are told so."""

from __future__ import annotations

import warnings

import pytest
import torch

import forked_command
from fleetx import StrategyError, UsageError, fleet
from training import net, sgd, zero_last


def _differ(declared):
    fleet.init()
    model = net()
    strategy = fleet.DistributedStrategy(**declared[fleet.worker_index()])
    try:
        fleet.distribute(model, sgd(model), strategy)
    except StrategyError as error:
        return error.problems
    return []


def test_different_strategies_name_ranks_and_keys(ranks):
    declared = [{"gradient_merge": {"k_steps": 2}}, {"gradient_merge": {"k_steps": 4}, "sync_batch_norm": True}]
    first, second = ranks.run(_differ, declared)
    assert first == second
    assert first == [
        "the ranks declare different strategies (gradient_merge_configs['k_steps'] = 2 on rank 0, 4 on rank 1): "
        "declare the same one on every rank",
        "the ranks declare different strategies (sync_batch_norm = False on rank 0, True on rank 1): "
        "declare the same one on every rank",
    ]


def test_the_same_strategy_in_other_words(ranks):
    declared = [{"gradient_merge": True}, {"gradient_merge": {"k_steps": 1}}]
    assert ranks.run(_differ, declared) == [[], []]


def _at_init():
    strategy = fleet.DistributedStrategy(amp={"dtype": ["float16", "bfloat16"][fleet_rank()]})
    with pytest.raises(StrategyError, match="'float16' on rank 0, 'bfloat16' on rank 1"):
        fleet.init(strategy=strategy)
    return True


def fleet_rank():
    import torch.distributed as dist

    return dist.get_rank()


def test_found_at_init_where_a_strategy_is_given_there(ranks):
    assert ranks.run(_at_init) == [True, True]


def _uneven(counts):
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(gradient_merge={"k_steps": 2}))
    from training import batches

    seen = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in fleet.join(batches(counts[fleet.worker_index()])):
            zero_last(model, optimizer, x, y)
            seen += 1
        fleet.flush()
    return seen, [str(w.message) for w in caught]


def test_ranks_with_unequal_numbers_of_batches_stop_together(ranks):
    for seen, said in ranks.run(_uneven, [7, 5]):
        assert seen == 5
        assert said == ["rank 1 ran out of batches after 5; the remaining batches of the others are unused"]
    assert ranks.run(_uneven, [4, 4]) == [(4, []), (4, [])]


UNEQUAL = """
import torch
from fleetx import fleet
fleet.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3 if fleet.worker_index() == 1 else 5):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_rank_that_ran_out_is_named(tmp_path):
    (tmp_path / "train.py").write_text(UNEQUAL)
    done = forked_command.fleetrun(["--device", "cpu", "--nproc_per_node", "2", "train.py"], cwd=tmp_path)
    assert done.returncode
    said = done.stdout + done.stderr + (tmp_path / "log" / "workerlog.0").read_text()
    assert "the script had already ended on rank 1 after 3 updates, while rank 0 continued after 3" in said
    assert "fleet.join(loader)" in done.stderr, done.stderr


# --- models and optimizers ------------------------------------------------------------------------
OTHERWISE = {
    "rate": lambda model: torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
    "optimizer": lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
    "dtype": lambda model: sgd(model.double()),
    "frozen": lambda model: sgd(model) if model[0].requires_grad_(False) else None,
    "shape": lambda model: sgd(_with(model, 2, torch.nn.Linear(16, 9))),
    "fewer": lambda model: sgd(_with(model, 0, torch.nn.Linear(6, 16, bias=False))),
    "groups": lambda model: torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1, momentum=0.9),
    "buffer": lambda model: sgd(_with_buffer(model)),
}

TOLD = {
    "rate": ["param_groups[0]['lr'] = 0.1 on rank 0, 0.2 on rank 1"],
    "optimizer": ["optimizer = SGD on rank 0, Adam on rank 1", "param_groups[0]['betas'] = absent on rank 0"],
    "dtype": ["parameter 0.weight = float32 (16, 6) on rank 0, float64 (16, 6) on rank 1", "2 more"],
    "frozen": ["parameter 0.bias = float32 (16,) on rank 0, float32 (16,) frozen on rank 1"],
    "shape": ["parameter 2.weight = float32 (8, 16) on rank 0, float32 (9, 16) on rank 1"],
    "fewer": ["parameter 0.bias = float32 (16,) on rank 0, absent on rank 1", "param_groups[0]['params']"],
    "groups": ["param_groups[0]['params'] = ['0.weight', '0.bias', '2.weight'", "['0.weight'] on rank 1"],
    "buffer": ["buffer scale = absent on rank 0, float32 (3,) on rank 1"],
}


def _with(model, index, layer):
    model[index] = layer
    return model


def _with_buffer(model):
    model.register_buffer("scale", torch.ones(3))
    return model


def _build_otherwise(how):
    fleet.init()
    model = net()
    optimizer = OTHERWISE[how](model) if fleet.worker_index() == 1 else sgd(model)
    try:
        fleet.distribute(model, optimizer)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", OTHERWISE)
def test_ranks_that_build_different_models_or_optimizers_are_named(ranks, how):
    first, second = ranks.run(_build_otherwise, how)
    assert first == second
    assert "build the same model and the same optimizer on every rank" in first
    for told in TOLD[how]:
        assert told in first


def _build_alike():
    fleet.init()
    model = net()
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": torch.tensor(0.1)}, {"params": model[2:].parameters()}],
        lr=0.1,
        betas=(0.9, 0.95),
    )
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    fleet.distribute(model, optimizer)
    return True


def test_ranks_that_build_the_same_agree(ranks):
    assert ranks.run(_build_alike) == [True, True]


def test_lazy_modules_are_told_apart_from_models_that_are_ready():
    fleet.init()
    model = torch.nn.Sequential(torch.nn.LazyLinear(3))
    with pytest.raises(StrategyError, match=r"0.weight.* lazy .* call the model once on a batch before"):
        fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
