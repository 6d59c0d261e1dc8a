"""The facade: every call that a script makes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import forked_command
from fleetx import StrategyError, UsageError, fleet
from fleetx.comm.session import current
from fleetx.strategy.explain import in_order
from training import assert_equal, batches, net, sgd, train, weights


def test_a_world_of_one_needs_no_launcher():
    fleet.init(is_collective=True)
    assert (fleet.worker_index(), fleet.worker_num(), fleet.local_rank()) == (0, 1, 0)
    assert fleet.is_first_worker()
    assert fleet.is_worker()
    assert fleet.worker_endpoints() == ["127.0.0.1:0"]
    assert fleet.worker_endpoints(to_string=True) == "127.0.0.1:0"
    assert fleet.device() == torch.device("cpu")
    fleet.barrier_worker()


def test_two_workers_know_each_other(ranks):
    assert ranks.run(_who) == [(0, 2, True), (1, 2, False)]


def _who():
    fleet.init()
    fleet.barrier_worker()
    return fleet.worker_index(), fleet.worker_num(), fleet.is_first_worker()


PAIR = """
import sys
from fleetx import fleet
role = fleet.base.role_maker.UserDefinedRoleMaker(
    is_collective=True, current_id=int(sys.argv[1]), worker_num=2, worker_endpoints=sys.argv[2].split(","))
fleet.init(role) if sys.argv[1] == "0" else fleet.init()
fleet.barrier_worker()
print(fleet.worker_index(), fleet.worker_num(), fleet.worker_endpoints(to_string=True))
"""


@pytest.mark.slow
def test_processes_meet_by_role_maker_and_by_paddles_environment():
    """Rank 0 is told by a role maker, rank 1 by what Paddle's launcher sets; both leave with exit code 0."""
    with socket.socket() as a, socket.socket() as b:
        a.bind(("127.0.0.1", 0))
        b.bind(("127.0.0.1", 0))
        ends = f"127.0.0.1:{a.getsockname()[1]},127.0.0.1:{b.getsockname()[1]}"
    paddle = {
        "PADDLE_TRAINER_ID": "1",
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_TRAINER_ENDPOINTS": ends,
        "PADDLE_CURRENT_ENDPOINT": ends.split(",")[1],
    }
    workers = [  # not forked: gloo may abort while Python itself exits
        subprocess.Popen(
            [sys.executable, "-c", PAIR, str(rank), ends],
            env=os.environ | (paddle if rank else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [w.communicate(timeout=100) for w in workers]
    assert [w.returncode for w in workers] == [0, 0], outputs
    assert [out.strip() for out, _ in outputs] == [f"0 2 {ends}", f"1 2 {ends}"]


@pytest.mark.slow
def test_a_master_that_nobody_answers_at_is_a_clear_error(tmp_path):
    code = (
        "from datetime import timedelta; from fleetx import fleet, WorldError\n"
        "try: fleet.init(timeout=timedelta(seconds=2))\n"
        "except WorldError as e: print(e)"
    )
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = os.environ | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    (tmp_path / "alone.py").write_text(code)
    out = forked_command.python(["alone.py"], cwd=tmp_path, env=env)
    assert f"rank 1 of 2 could not reach the others at 127.0.0.1:{port}" in out.stdout, out
    assert "Check that all 2 workers are started" in out.stdout


def test_everything_before_init_says_what_to_call():
    model = net()
    for call in (fleet.worker_index, fleet.device, lambda: fleet.distribute(model, sgd(model))):
        with pytest.raises(UsageError, match=r"call it first"):
            call()
    fleet.init()
    for call in (fleet.flush, fleet.explain):
        with pytest.raises(UsageError, match=r"call fleet.distribute\(model, optimizer, strategy\) first"):
            call()


def test_parameter_servers_are_refused():
    with pytest.raises(StrategyError, match="parameter servers"):
        fleet.init(is_collective=False)
    with pytest.raises(StrategyError, match="pass is_collective=True to train collectively"):
        fleet.init(fleet.PaddleCloudRoleMaker())
    with pytest.raises(TypeError, match=r"role_maker must be one of fleet.base.role_maker, not str"):
        fleet.init("collective")
    fleet.init(fleet.PaddleCloudRoleMaker(is_collective=True))


def test_a_wrong_strategy_is_refused_at_init_before_anybody_is_met():
    with pytest.raises(StrategyError, match="recompute_configs is set, but recompute is off"):
        fleet.init(strategy=fleet.DistributedStrategy(recompute_configs={"checkpoints": ["a"]}))
    assert current().world is None


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("where", ["init", "optimizer"])
def test_paddles_two_calls_are_distribute_in_either_order(order, where):
    strategy = fleet.DistributedStrategy(clip={"clip_norm": 0.05})
    fleet.init(is_collective=True, strategy=strategy if where == "init" else None)
    model = net()
    optimizer = sgd(model)
    given = () if where == "init" else (strategy,)
    if order == "model first":
        model = fleet.distributed_model(model)
        optimizer = fleet.distributed_optimizer(optimizer, *given)
    else:
        optimizer = fleet.distributed_optimizer(optimizer, *given)
        with pytest.raises(UsageError, match="must both be called"):
            fleet.explain()
        model = fleet.distributed_model(model)
    assert fleet.explain().requested == ["clip"]


def test_half_of_the_pair_twice_is_refused():
    fleet.init()
    fleet.distributed_model(net())
    with pytest.raises(UsageError, match="distributed_model was called twice"):
        fleet.distributed_model(net())


def test_wrong_types_are_refused():
    fleet.init()
    model = net()
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not list"):
        fleet.distribute([], sgd(model))
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, not str"):
        fleet.distribute(model, "sgd")
    with pytest.raises(TypeError, match=r"strategy must be a fleet.DistributedStrategy, not dict"):
        fleet.distribute(model, sgd(model), {"amp": True})


def test_distributing_twice_is_refused():
    fleet.init()
    model = net()
    optimizer = sgd(model)
    fleet.distribute(model, optimizer)
    with pytest.raises(UsageError, match=r"distributed already: call fleet.release\(model\) first"):
        fleet.distribute(model, sgd(model))


def test_two_models_are_told_apart_by_name():
    fleet.init()
    merge = fleet.DistributedStrategy(gradient_merge={"k_steps": 3})
    (a, oa), (b, ob) = [fleet.distribute(m, sgd(m), s) for m, s in ((net(), merge), (net(), None))]
    with pytest.raises(UsageError, match=r"2 models are distributed: pass optimizer=... to choose one"):
        fleet.flush()
    x, y = batches(1)[0]
    for model, optimizer in ((a, oa), (b, ob)):
        fleet.forward_backward(x, y, loss_fn=mse_loss, model=model)
        optimizer.step()
    assert fleet.flush(optimizer=oa)
    assert not fleet.flush(optimizer=ob)
    assert fleet.explain(model=a).requested == ["gradient_merge"]
    with pytest.raises(UsageError, match=r"not been passed to fleet.distribute"):
        fleet.flush(optimizer=sgd(net()))


def test_forward_backward_is_the_plain_loop():
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model))
    for x, y in batches():
        loss = fleet.forward_backward(x, y, loss_fn=mse_loss)
        assert not loss.requires_grad
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(weights(model), train(batches()))


class OwnLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net()

    def forward(self, x, y):
        return mse_loss(self.body(x), y)


def test_forward_backward_takes_tuples_dicts_and_models_that_return_their_loss():
    fleet.init()
    model = OwnLoss()
    model, optimizer = fleet.distribute(model, sgd(model))
    for i, (x, y) in enumerate(batches()):
        fleet.forward_backward({"x": x, "y": y} if i % 2 else (x, y))
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(weights(model.body), train(batches()))


def test_forward_backward_without_a_loss_says_what_to_pass():
    fleet.init()
    model = net()
    fleet.distribute(model, sgd(model))
    with pytest.raises(UsageError, match=r"pass loss_fn=..."):
        fleet.forward_backward(batches(1)[0][0])


def test_explain_says_what_happens_in_order_and_why(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    fleet.init()
    model = net()
    strategy = fleet.DistributedStrategy(amp=True, gradient_merge={"k_steps": 4}, clip=True)
    fleet.distribute(model, sgd(model), strategy)
    told = fleet.explain()
    assert told.requested == ["amp", "clip", "gradient_merge"]
    assert told.applied.index("amp.unscale") < told.applied.index("clip.shrink")
    text = str(told)
    for piece in ("requested: amp, clip, gradient_merge", "k_steps=4", "one rank", "runs after amp and"):
        assert piece in text, piece
    assert all(len(line) <= 118 for line in text.splitlines())


def test_explain_gives_each_reason_with_the_switches_it_is_about():
    plan = fleet.DistributedStrategy(amp=True, gradient_merge={"k_steps": 4}, clip=True, noise_scale=True).plan()
    (told,) = [told for stage, switch, told in in_order(plan) if (stage.name, switch) == ("GRADIENT", "clip")]
    assert told.split("; ")[1:] == [
        "runs after amp and gradient_merge, because it does not work with gradients multiplied by a loss scale or "
        "gradients summed over merged steps without averaging",
        "after noise_scale, which must not see gradients that are no longer the mean over the batch",
    ]


def test_updated_tells_whether_the_last_step_applied():
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(gradient_merge={"k_steps": 2}))
    told = []
    for x, y in batches(4):
        fleet.forward_backward(x, y, loss_fn=mse_loss)
        optimizer.step()
        optimizer.zero_grad()
        told.append(fleet.updated)
    assert told == [False, True, False, True]
