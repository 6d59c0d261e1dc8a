"""Every warning points at a line of the script."""

from __future__ import annotations

import copy
import linecache
import subprocess
import sys
import warnings

import torch

from fleetx import fleet, schedule
from training import batches, net, sgd, zero_last

MERGE = {"gradient_merge": {"k_steps": 2}}


def build(settings):
    fleet.init()
    model = net()
    return fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**settings))


def lines(call):
    """The lines that the warnings of this call point at."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [(w.filename, linecache.getline(w.filename, w.lineno).strip()) for w in caught]


def test_a_checkpoint_without_our_state():
    _, optimizer = build(MERGE)
    saved = sgd(net()).state_dict()

    def load():
        optimizer.load_state_dict(saved)  # through torch's hooks

    assert lines(load) == [(__file__, "optimizer.load_state_dict(saved)  # through torch's hooks")]


def test_a_checkpoint_with_state_of_a_strategy_that_is_off():
    _, optimizer = build({"amp": {"dtype": "float16"}})
    saved = copy.deepcopy(optimizer.state_dict())
    _, plain = build({})
    assert lines(lambda: plain.load_state_dict(saved))[0][0] == __file__


def test_a_schedule_with_other_settings():
    make = lambda updates: schedule.large_batch(sgd(net()), updates=updates, warmup=1)  # noqa: E731
    saved = make(8).state_dict()
    assert lines(lambda: make(9).load_state_dict(saved))[0][0] == __file__


def unequal():
    fleet.init()
    rank = fleet.worker_index()

    def loop():
        for _ in fleet.join(range(2 + rank)):  # here
            pass

    return lines(loop)


def test_a_loader_that_runs_out(ranks):
    for found in ranks.run(unequal):
        assert found == [(__file__, "for _ in fleet.join(range(2 + rank)):  # here")]


def test_a_script_that_ends_too_early_is_told_where_it_distributes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from fleetx import fleet\n"
        "fleet.init()\n"
        "model = torch.nn.Linear(2, 1)\n"
        "strategy = fleet.DistributedStrategy(gradient_merge={'k_steps': 2})\n"
        "model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "optimizer.step()\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True)
    assert f"{script}:6: UserWarning: the script ends inside a merge window" in done.stderr


def test_a_line_warns_once_as_python_has_it():
    model, optimizer = build({"amp": {"dtype": "float16"}})
    zero_last(model, optimizer, *batches(1)[0])
    saved = copy.deepcopy(optimizer.state_dict())
    _, plain = build({})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            plain.load_state_dict(saved)
    assert len(caught) == 1


def test_torch_does_not_count_as_the_script():
    from fleetx.base.user_line import user_line

    found = []

    class Asks(torch.nn.Module):
        def forward(self, x):
            return x

    module = Asks()
    module.register_forward_hook(torch.no_grad()(lambda *_: found.append(user_line())))
    module(1)
    assert found[0][0] == __file__
