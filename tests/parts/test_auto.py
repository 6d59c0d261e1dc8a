"""auto: all ranks choose the same plan, the search leaves no traces, and what is not possible is an error."""

from __future__ import annotations

import os
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import forked_command
from fixed_times import fixed_times
from fleetx import DistributedStrategy, StrategyError, UsageError, fleet
from fleetx.cli import main
from fleetx.comm.session import current
from fleetx.planner import choose, search
from fleetx.planner.report import table
from fleetx.planner.trial import Trial
from forking import forks

QUICK = {"cache": False, "trials": 0, "max_seconds": 600.0}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLEETX_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def fixed():
    """A search that measures no time."""
    with fixed_times():
        yield


def deep(width=64):
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(width, width), nn.Tanh())], nn.Linear(width, 5))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def sample(n=16, width=64):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(n, width, generator=generator), torch.randint(0, 5, (n,), generator=generator)


def distributed(strategy, batch=None):
    model = deep()
    return fleet.distribute(model, sgd(model), strategy, sample=batch or sample(), loss_fn=cross_entropy)


def chosen(settings, data=None, **declared):
    model = deep()
    strategy = DistributedStrategy(auto=QUICK | settings, **declared)
    return choose(model, sgd(model), strategy, current().here(), sample=data or sample(), loss_fn=cross_entropy)


def trained(model, optimizer):
    """The parameters that this rank holds after four steps of `fleet.batch().feed` samples."""
    x, y = sample(64)
    feed = fleet.batch().feed
    for i in range(4):
        rows = [(i * feed + j) % 64 for j in range(feed)]
        fleet.forward_backward(x[rows], y[rows], loss_fn=cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    held = {name: p.detach() for name, p in model.named_parameters() if not p.is_meta}
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.clone() for name, p in held.items()}


# --- the choice and its file ----------------------------------------------------------------------
def _auto(folder, settings):
    os.environ["FLEETX_CACHE"] = f"{folder}/cache{os.environ.get('RANK', '')}"
    fleet.init()
    model, optimizer = distributed(DistributedStrategy(auto=QUICK | settings))
    batch = fleet.batch()
    return batch.strategy.declared(), (batch.feed, batch.merged, batch.replicas), trained(model, optimizer)


def _auto_fixed(folder, settings):
    with fixed_times():
        return _auto(folder, settings)


def _loaded(path):
    fleet.init()
    model = deep()
    model, optimizer = fleet.distribute(model, sgd(model), DistributedStrategy.load(path))
    batch = fleet.batch()
    return batch.strategy.declared(), (batch.feed, batch.merged, batch.replicas), trained(model, optimizer)


@pytest.mark.parametrize(
    ("search", "settings"),
    [
        (_auto, {"trials": 1}),
        (_auto_fixed, {"global_batch": 32, "trials": 1}),
        (_auto_fixed, {"global_batch": 32, "trials": 1, "allow": "lossy"}),
        (_auto_fixed, {"global_batch": 32, "memory_budget": "130KiB"}),  # fits only in a pipeline
    ],
    ids=["measured", "tried", "lossy", "little memory"],
)
def test_ranks_choose_the_same_plan_and_its_file_repeats_the_run_bit_for_bit(search, settings, ranks, tmp_path):
    file = tmp_path / "plan.yaml"
    found = ranks.run(search, str(tmp_path), settings | {"output": str(file)})
    assert found[0][:2] == found[1][:2]
    feed, merged, replicas = found[0][1]
    assert feed * merged * replicas == 32
    assert "auto" not in DistributedStrategy.load(file).declared()
    loaded = ranks.run(_loaded, str(file))
    assert [one[:2] for one in loaded] == [one[:2] for one in found]
    # The stages of a pipeline are balanced by measured times, so a rank may hold other parameters in the second run.
    auto, again = (first[2] | second[2] for first, second in (found, loaded))
    assert auto.keys() == again.keys() == dict(deep().named_parameters()).keys()
    assert all(torch.equal(auto[name], again[name]) for name in auto)


def _repeat(pipe):
    torch.set_num_threads(1)
    _, batch, values = _loaded("plan.yaml")
    pipe.send([batch, {name: value.tolist() for name, value in values.items()}])


def test_a_new_process_repeats_the_run_from_the_file_bit_for_bit(fixed):
    fleet.init()
    settings = {"global_batch": 48, "output": "plan.yaml"}
    model, optimizer = distributed(DistributedStrategy(auto=QUICK | settings, gradient_merge={"k_steps": 3}))
    values = trained(model, optimizer)
    assert "batch: {feed: 16, merged: 3, replicas: 1}" in Path("plan.yaml").read_text()
    context = get_context(forks())
    ours, theirs = context.Pipe()
    process = context.Process(target=_repeat, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(200)
    batch, repeated = ours.recv()
    process.join()
    assert batch == (16, 3, 1)
    assert repeated == {name: value.tolist() for name, value in values.items()}


def test_no_file_is_written_unless_asked_for(fixed):
    fleet.init()
    before = set(Path().iterdir())
    assert chosen({}).path == ""
    assert {path.name for path in set(Path().iterdir()) - before} == {"cache"}, "the profile for what-if questions"


def test_a_file_that_auto_did_not_write_is_never_overwritten(fixed):
    Path("strategy.yaml").write_text("amp: true\n")
    fleet.init()
    with pytest.raises(UsageError, match=r"the file exists, and auto did not write it: choose another name"):
        chosen({"output": "strategy.yaml"})
    assert Path("strategy.yaml").read_text() == "amp: true\n"
    with pytest.raises(UsageError, match="the folder does not exist"):
        chosen({"output": "nowhere/strategy.yaml"})
    Path("strategy.yaml").unlink()
    for _ in range(2):  # its own file is replaced
        assert chosen({"output": "strategy.yaml"}).path == "strategy.yaml"


def test_a_plan_is_cached_for_the_next_run(fixed):
    fleet.init()
    first, second = chosen({"cache": True}), chosen({"cache": True, "output": "strategy.yaml"})
    assert "found in the cache" not in first.text
    assert "found in the cache" in second.text
    assert second.strategy == first.strategy == DistributedStrategy.load("strategy.yaml")


def test_the_plan_is_explained(fixed):
    fleet.init()
    distributed(DistributedStrategy(auto=QUICK | {"global_batch": 48, "trials": 1}))
    batch = fleet.batch()
    assert batch.feed * batch.merged == batch.total == 48
    assert "plans predicted, 1 tried" in str(batch)
    assert str(batch) in str(fleet.explain())


def test_declared_parts_are_kept(fixed):
    fleet.init()
    distributed(DistributedStrategy(auto=QUICK | {"global_batch": 48}, gradient_merge={"k_steps": 3}, clip=True))
    batch = fleet.batch()
    assert (batch.feed, batch.merged) == (16, 3)
    assert batch.strategy.clip
    assert not batch.strategy.auto


def test_less_memory_means_smaller_steps_and_too_little_is_an_error(fixed):
    fleet.init()
    batch, settings = sample(512), {"global_batch": 512}
    large = chosen(settings | {"memory_budget": "100MiB"}, batch).strategy
    small = chosen(settings | {"memory_budget": "700KiB"}, batch).strategy
    assert large.batch_configs["feed"] == 512
    assert small.batch_configs["feed"] < 512 or small.recompute
    with pytest.raises(StrategyError, match=r"no plan fits into 50.0 KiB. The smallest one, .*, needs .* Use a "):
        chosen(settings | {"memory_budget": "50KiB"}, batch)


def test_the_objective_memory_needs_fewest_bytes(fixed):
    fleet.init()
    objectives = ({"global_batch": 64, "objective": name} for name in ("throughput", "memory"))
    fast, small = (chosen(settings, sample(64)).strategy for settings in objectives)
    assert small.batch_configs["feed"] < fast.batch_configs["feed"]


# --- the search -----------------------------------------------------------------------------------
def test_the_search_leaves_model_optimizer_and_random_state_unchanged():
    fleet.init()
    model = deep()
    optimizer = sgd(model)
    before, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
    strategy = DistributedStrategy(auto=QUICK | {"trials": 1})
    choose(model, optimizer, strategy, current().here(), sample=sample(), loss_fn=cross_entropy)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())


def _own_samples(sizes):
    """Every rank brings its own batch, as loaders do."""
    fleet.init()
    rank = fleet.worker_index()
    generator = torch.Generator().manual_seed(rank)
    n = sizes[rank]
    mine = torch.randn(n, 64, generator=generator), torch.randint(0, 5, (n,), generator=generator)
    deep()
    before = torch.get_rng_state()
    try:
        with fixed_times():
            found = chosen({"global_batch": 32, "trials": 1}, mine, pipeline={"accumulate_steps": 2})
    except UsageError as error:
        return str(error)
    return dict(found.strategy.batch_configs), "failed" in found.text, torch.equal(before, torch.get_rng_state())


def test_ranks_may_bring_different_samples_of_one_shape_and_a_declared_pipeline_is_one_replica(ranks):
    split = {"feed": 32, "merged": 1, "replicas": 1}
    assert ranks.run(_own_samples, [16, 16]) == [(split, False, True)] * 2
    for error in ranks.run(_own_samples, [12, 16]):
        assert "rank 0 and rank 1 have different shapes" in error


def test_a_plan_that_fails_in_its_trial_is_never_chosen_and_its_error_is_shown(fixed):
    fleet.init()
    broken = patch.object(search, "try_out", lambda *_, **__: Trial(error="[/somewhere] broke [bold]"))
    with broken, pytest.raises(StrategyError, match=r"no plan runs. .* failed in the trial: \[/somewhere\] broke"):
        chosen({"global_batch": 32, "trials": 1})


def test_brackets_in_an_error_are_not_markup():
    cost = type("Cost", (), {"seconds": 1.0, "peak": 1})
    fields = {"title": "as declared [1]", "feed": 4, "exact": True, "trial": None, "cost": cost}
    assert "[/x] bad" in table([type("Made", (), fields | {"rejection": "[/x] bad"})])


# --- errors ---------------------------------------------------------------------------------------
def test_a_strategy_that_does_not_suit_the_world_is_an_error_before_the_search():
    fleet.init()
    with pytest.raises(StrategyError, match="sharding_degree = 8 does not divide 1 rank"):
        chosen({}, sharding={"sharding_degree": 8})
    with pytest.raises(UsageError, match=r"auto chooses how the batch is split: remove strategy.batch"):
        chosen({}, batch={"feed": 4})


class DependsOnValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 5)

    def forward(self, x):
        return self.inner(x) * (2.0 if x.sum().item() > 0 else 1.0)


def test_a_model_whose_path_depends_on_values_is_an_error(fixed):
    fleet.init()
    model = DependsOnValues()
    with pytest.raises(UsageError, match="the bytes of this model cannot be counted"):
        fleet.distribute(model, sgd(model), DistributedStrategy(auto=QUICK), sample=sample(), loss_fn=cross_entropy)


def test_without_a_sample_the_error_shows_two_lines_to_add():
    fleet.init()
    model = deep()
    with pytest.raises(UsageError, match=r"(?s)Add two lines:.*sample=\(x, y\), loss_fn=loss_fn"):
        fleet.distribute(model, sgd(model), DistributedStrategy(auto=True))
    with pytest.raises(UsageError, match=r"must be a pair: sample=\(inputs, targets\)"):
        fleet.distribute(model, sgd(model), DistributedStrategy(auto=True), sample=sample()[0], loss_fn=cross_entropy)


def test_a_sample_that_the_model_cannot_take_is_an_error():
    fleet.init()
    with pytest.raises(UsageError, match="the model failed on the sample: RuntimeError"):
        chosen({}, sample(16, width=63))
    model = deep()
    with pytest.raises(UsageError, match="needs a scalar loss"):
        fleet.distribute(model, sgd(model), DistributedStrategy(auto=QUICK), sample=sample()[0])


# --- fleetx plan ----------------------------------------------------------------------------------
SCRIPT = """
import torch
from torch import nn
from fleetx import fleet
fleet.init()
model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sample = torch.randn(8, 32), torch.randint(0, 3, (8,))
fleet.distribute(model, optimizer, sample=sample, loss_fn=nn.functional.cross_entropy)
print("trained", flush=True)
"""


def plan(*words):
    return forked_command.fleetx_(["plan", *words, "--device", "cpu"], cwd=Path.cwd())


def test_fleetx_plan_of_a_script_that_distributes_nothing_is_an_error():
    Path("never.py").write_text("print('nothing')\n")
    result = plan("never.py")
    assert result.returncode == 1
    assert "never.py ended without calling fleet.distribute" in result.stderr


def test_fleetx_plan_runs_a_script_up_to_its_plan():
    Path("train.py").write_text(SCRIPT)
    question = ["--nodes", "4", "--link", "1GB/s", "--memory", "1GiB"]
    result = plan("train.py", "--nproc_per_node", "2", "--trials", "0", "--global_batch", "16", *question)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "trained" not in result.stdout
    assert "batch: 16 =" in result.stdout
    assert "4 nodes" in result.stdout
    assert DistributedStrategy.load("strategy.yaml").batch


def test_fleetx_plan_does_not_overwrite_a_file_of_the_user():
    Path("train.py").write_text(SCRIPT)
    Path("strategy.yaml").write_text("amp: true\n")
    result = CliRunner().invoke(main, ["plan", "train.py"])
    assert result.exit_code == 1
    assert "auto did not write it" in result.output
