"""torch.distributed.checkpoint: a resumed run equals the unbroken one, bit for bit, or an error says why."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.functional import mse_loss

from fleetx import fleet
from fleetx.errors import UsageError
from rank_pool import RankError, forget

WIDTH = 150  # DGC compresses tensors of 16384 elements
END = 8
MERGE = {"gradient_merge": {"k_steps": 3}}
FP16 = {"amp": {"dtype": "float16", "incr_every_n_steps": 2}}
DGC = {"dgc": {"sparsity": [0.9]}}
SHARDING = {"sharding": {"stage": 3}}
ALONE = [
    {},
    MERGE,
    {**MERGE, **FP16, "clip": {"clip_norm": 0.1}},
    {"lamb": True, "gradient_merge": {"k_steps": 2}},
    {"muon": True},
]
TOGETHER = [
    *ALONE[:3],
    DGC,
    {**DGC, "gradient_merge": {"k_steps": 2}},
    {"localsgd": {"k_steps": 3}},
    {"localsgd": {"k_steps": 2, "outer_momentum": 0.5, "outer_lr": 0.7}, "gradient_merge": {"k_steps": 2}},
    {"localsgd": {"k_steps": 2, "overlap": True}},
    {"adaptive_localsgd": {"init_k_steps": 2}},
    {"broadcast_buffers": False},
    SHARDING,
    {**SHARDING, **MERGE, **FP16},
]


def build(declared, seed=0):
    fleet.init()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    if "dgc" in declared:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0 if "lamb" in declared else 0.01)
    return fleet.distribute(model, optimizer, fleet.DistributedStrategy(**declared))


def data(steps):
    g = torch.Generator().manual_seed(1 + fleet.worker_index())
    every = [(torch.randn(4, 6, generator=g), torch.randn(4, 3, generator=g)) for _ in range(END)]
    return every[steps]


def go_on(model, optimizer, steps):
    for x, y in data(steps):
        fleet.backward(mse_loss(model(x), y), optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()


def held(model, optimizer):
    """Everything that this rank holds, shards included."""
    values = [v for p in model.parameters() for _, v in sorted(optimizer.state.get(p, {}).items())]
    found = [*model.state_dict().values(), *(v for v in values if isinstance(v, torch.Tensor))]
    return [getattr(t, "_local_tensor", t).clone() for t in found]


class App:
    """As torch's tutorial has it."""

    def __init__(self, model, optimizer, options=None):
        self.model, self.optimizer, self.options = model, optimizer, options

    def state_dict(self):
        model, optim = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state):
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"],
            options=self.options,
        )  # fmt: skip


def save(model, optimizer, folder, way):
    if way == "functions":
        dcp.save(App(model, optimizer).state_dict(), checkpoint_id=folder)
    else:
        given = {"app": App(model, optimizer)} if way == "app" else {"optim": optimizer, "model": model}
        dcp.save(given, checkpoint_id=folder)


def load(model, optimizer, folder, way, **options):
    if way == "functions":
        app = App(model, optimizer)
        state = app.state_dict()
        dcp.load(state, checkpoint_id=folder, **options)
        app.load_state_dict(state)
    else:
        given = {"app": App(model, optimizer)} if way == "app" else {"optim": optimizer, "model": model}
        dcp.load(given, checkpoint_id=folder, **options)


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")  # of dcp, in one process
@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("declared", [{}, MERGE, {"lamb": True, "gradient_merge": {"k_steps": 2}}], ids=" ".join)
def test_an_optimizer_that_is_passed_itself_keeps_its_moments(declared, after, tmp_path):
    """A new optimizer has no state, and torch loads only what is there."""
    assert resumes(declared, tmp_path, "objects", after) == [True, True]


@pytest.mark.parametrize("declared", [MERGE, DGC, {**SHARDING, **MERGE, **FP16}], ids=" ".join)
def test_two_ranks_keep_the_moments_of_an_optimizer_that_is_passed_itself(declared, ranks, tmp_path):
    assert ranks.run(resumes, declared, tmp_path, "objects", 5) == [[True, True]] * 2


def resumes(declared, folder, way, after):
    model, optimizer = build(declared)
    go_on(model, optimizer, slice(after))
    save(model, optimizer, folder, way)
    again, optimizer2 = build(declared, seed=7)
    load(again, optimizer2, folder, way)
    for pair in ((again, optimizer2), (model, optimizer)):  # the second also shows that saving changes nothing
        go_on(*pair, slice(after, None))
    forget()
    unbroken = build(declared)
    go_on(*unbroken, slice(None))
    expected = held(*unbroken)
    return [len(f := held(*pair)) == len(expected) and all(map(torch.equal, f, expected))
            for pair in ((again, optimizer2), (model, optimizer))]  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")  # of dcp, in one process
@pytest.mark.parametrize("after", [1, 5])
@pytest.mark.parametrize("declared", ALONE, ids=" ".join)
def test_one_process_resumes(declared, after, tmp_path):
    assert resumes(declared, tmp_path, ["functions", "app"][after // 4], after) == [True, True]


@pytest.mark.parametrize("declared", TOGETHER, ids=" ".join)
def test_two_ranks_resume(declared, ranks, tmp_path):
    number = TOGETHER.index(declared)
    found = ranks.run(resumes, declared, tmp_path, ["functions", "app", "objects"][number % 3], [5, 4, 1][number % 3])
    assert found == [[True, True]] * 2


# --- other ranks ----------------------------------------------------------------------------------
def trained(declared, steps, folder):
    model, optimizer = build(declared)
    go_on(model, optimizer, slice(steps))
    save(model, optimizer, folder, "functions")
    return held(model, optimizer)


def resumed(declared, folder, partial=False):
    model, optimizer = build(declared, seed=7)
    options = {"planner": DefaultLoadPlanner(allow_partial_load=True)} if partial else {}
    load(model, optimizer, folder, "functions", **options)
    return held(model, optimizer), optimizer.state_dict()["fleetx"]["round"]


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_state_that_ranks_share_is_resumed_by_any_number_of_them(ranks, tmp_path):
    before = ranks.run(trained, FP16, 4, tmp_path / "two")[0]
    found, round_ = resumed(FP16, tmp_path / "two")
    assert all(map(torch.equal, found, before))
    assert round_ == 4
    trained(FP16, 4, tmp_path / "one")
    assert [round_ for _, round_ in ranks.run(resumed, FP16, tmp_path / "one")] == [4, 4]


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_fewer_ranks_resume_between_windows_only(ranks, tmp_path):
    ranks.run(trained, MERGE, 6, tmp_path / "between")
    assert resumed(MERGE, tmp_path / "between")[1] == 2
    ranks.run(trained, MERGE, 7, tmp_path / "inside")
    with pytest.raises(
        UsageError, match=r"saved inside a merge window on 2 ranks, and has no gradients for rank 0 of 1"
    ):
        resumed(MERGE, tmp_path / "inside")


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_more_ranks_resume_if_torch_may_leave_out_what_is_missing(ranks, tmp_path):
    trained(MERGE, 6, tmp_path)
    with pytest.raises(RankError, match=r"Missing key in checkpoint state_dict: optim.param_groups.0.fleetx.rank_1"):
        ranks.run(resumed, MERGE, tmp_path)
    assert [round_ for _, round_ in ranks.run(resumed, MERGE, tmp_path, True)] == [2, 2]


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_what_ranks_have_of_their_own_is_resumed_by_them_only(ranks, tmp_path):
    ranks.run(trained, {"localsgd": {"k_steps": 3}}, 4, tmp_path)
    with pytest.raises(UsageError, match=r"under localsgd each of 2 ranks has its own state.*use fleet\.save"):
        resumed({"localsgd": {"k_steps": 3, "allow_single": True}}, tmp_path)


def _whole(declared, after):
    """All of it from rank 0, as for a file that one rank writes."""
    model, optimizer = build(declared)
    go_on(model, optimizer, slice(after))
    saved = App(model, optimizer, StateDictOptions(full_state_dict=True, cpu_offload=True)).state_dict()
    saved = copy.deepcopy(saved)  # as from a file: torch does not copy what is on the CPU already
    again, optimizer2 = build(declared, seed=7)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(again, optimizer2, saved["optim"], options=options)
    set_model_state_dict(again, saved["model"], options=options)
    for pair in ((again, optimizer2), (model, optimizer)):
        go_on(*pair, slice(after, None))
    return all(map(torch.equal, held(again, optimizer2), held(model, optimizer)))


@pytest.mark.parametrize("declared", [FP16, {**SHARDING, **FP16}, {**SHARDING, **MERGE}], ids=" ".join)
def test_rank_0_may_hold_the_whole_state_and_broadcast_it(declared, ranks):
    assert ranks.run(_whole, declared, 3) == [True, True]


def test_rank_0_has_no_gradients_of_others_to_broadcast(ranks):
    with pytest.raises(RankError, match="saved inside a merge window"):
        ranks.run(_whole, MERGE, 4)


# --- what it cannot hold --------------------------------------------------------------------------
def test_a_flat_state_dict_is_refused():
    model, optimizer = build(MERGE)
    with pytest.raises(UsageError, match="flatten_optimizer_state_dict=True leaves out the state of the strat"):
        get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))


def _in_stages(folder):
    fleet.init()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fleet.distribute(model, optimizer, fleet.DistributedStrategy(pipeline={"micro_batch": 2}))
    messages = []
    for ask in (lambda: get_state_dict(model, optimizer), lambda: dcp.save({"optim": optimizer}, checkpoint_id=folder)):
        try:
            ask()
        except Exception as error:
            messages.append(str(error))
    return messages


def test_stages_are_refused(ranks, tmp_path):
    for messages in ranks.run(_in_stages, tmp_path):
        assert len(messages) == 2
        assert all("under pipeline each rank has only its stage" in m for m in messages)
