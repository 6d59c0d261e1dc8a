"""Lightning Fabric with FleetStrategy on two ranks, against a plain loop in one process, in float64."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings
from importlib.util import find_spec

import pytest
import torch
from guests import SAME, Model, Samples, as_launched, error_of, whole
from torch import nn

from fleetx import StrategyError, UsageError, fleet
from training import sgd

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
STEPS = 6


# Lightning's import takes seconds, so only tests import it: every pytest worker imports this file.
def fleet_strategy(*args):
    from fleetx.integrations.fabric import FleetStrategy

    return FleetStrategy(*args)


def fabric_of(strategy, devices=2, **options):
    from lightning.fabric import Fabric

    return Fabric(accelerator="cpu", devices=devices, strategy=strategy, **options)


def plain(k=1, clip=None, value=None):
    model, data = Model(), Samples(4 * STEPS)
    optimizer = sgd(model)
    for x, y in zip(data.x.split(4 * k), data.y.split(4 * k), strict=True):
        model(x, y)["loss"].backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if value is not None:
            nn.utils.clip_grad_value_(model.parameters(), value)
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def started(declared, **options):
    made = fabric_of(fleet_strategy(fleet.DistributedStrategy(**declared)), **options)
    made.launch()
    return made


def set_up(fabric):
    model = Model()
    return fabric.setup(model, sgd(model))


def loader(fabric):
    """Fabric's sampler deals the samples out in turn."""
    data = Samples(4 * STEPS)
    made = torch.utils.data.DataLoader(data, batch_size=2, shuffle=False)
    return fabric.setup_dataloaders(made)


def train(fabric, model, optimizer, batches, **clip):
    for batch in batches:
        fabric.backward(model(**batch)["loss"])
        if clip:
            fabric.clip_gradients(model, optimizer, **clip)
        optimizer.step()
        optimizer.zero_grad()
    return whole(model.module)


def trained(declared, clip):
    fabric = started(declared, precision="64-true")
    model, optimizer = set_up(fabric)
    return train(fabric, model, optimizer, loader(fabric), **clip)


def run(ranks, *args):
    return ranks.run(as_launched, *args)


@pytest.mark.parametrize(
    ("declared", "clip", "same"),
    [
        ({}, {}, {}),
        ({"gradient_merge": {"k_steps": 2}}, {}, {"k": 2}),
        ({"sharding": True}, {}, {}),
        ({"gradient_merge": {"k_steps": 2}, "clip": {"clip_norm": 0.1}}, {}, {"k": 2, "clip": 0.1}),
        ({}, {"max_norm": 0.1}, {"clip": 0.1}),
        ({}, {"clip_val": 0.01}, {"value": 0.01}),
        ({"sharding": True}, {"max_norm": 0.1}, {"clip": 0.1}),
    ],
    ids=["nothing", "merge", "sharding", "clip", "clip_gradients", "clip_val", "sharded clip_gradients"],
)
def test_two_ranks_equal_a_plain_loop(ranks, declared, clip, same):
    for found in run(ranks, trained, declared, clip):
        torch.testing.assert_close(found, plain(**same), **SAME)


def steps_of_a_module(declared, call):
    """A LightningModule is trained through its training_step."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = Model()

        def forward(self, x, labels):
            return self.inner(x, labels)

        def training_step(self, batch):
            return (self if call else self.forward)(**batch)["loss"]

    fabric = started(declared)
    module = Module()
    model, optimizer = fabric.setup(module, sgd(module))
    for batch in loader(fabric):
        fabric.backward(model.training_step(batch))
        optimizer.step()
        optimizer.zero_grad()
    return whole(module.inner)


@pytest.mark.parametrize("declared", [{}, {"gradient_merge": {"k_steps": 2}}], ids=["nothing", "merge"])
def test_a_training_step_that_calls_the_module_equals_a_plain_loop(ranks, declared):
    for found in run(ranks, steps_of_a_module, declared, True):
        torch.testing.assert_close(found, plain(k=2 if declared else 1), **SAME)


@pytest.mark.parametrize("declared", [{}, {"gradient_merge": {"k_steps": 2}}], ids=["nothing", "merge"])
def test_a_training_step_that_goes_around_the_module_is_an_error(ranks, declared):
    texts = ranks.run(error_of, steps_of_a_module, declared, False)
    assert all("output" in text for text in texts), texts


# --- checkpoints -------------------------------------------------------------------------------------------
def resumed(declared, folder):
    def start():
        fabric = started(declared)
        model, optimizer = set_up(fabric)
        return fabric, {"model": model, "optimizer": optimizer, "epoch": 0, "note": None,
                        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}  # fmt: skip

    fabric, state = start()
    batches = list(loader(fabric))
    train(fabric, state["model"], state["optimizer"], batches[:3])
    state["scheduler"].step()
    fabric.save(folder, state | {"epoch": 3, "more": [1, 2]})
    expected = train(fabric, state["model"], state["optimizer"], batches[3:])
    fabric, state = start()
    rest = fabric.load(folder, state)
    assert (state["epoch"], state["note"], rest) == (3, None, {"more": [1, 2]})
    assert state["scheduler"].last_epoch == 1
    with pytest.raises(KeyError, match="the checkpoint has no 'other'"):
        fabric.load(folder, state | {"other": 1})
    fabric.load(folder, state | {"other": 1}, strict=False)
    found = train(fabric, state["model"], state["optimizer"], batches[3:])
    return expected, found


@pytest.mark.parametrize(
    "declared", [{"gradient_merge": {"k_steps": 2}}, {"sharding": True}], ids=["merge", "sharding"]
)
def test_save_and_load_resume_bit_for_bit(ranks, tmp_path, declared):
    """In the middle of a merge window."""
    for expected, found in run(ranks, resumed, declared, str(tmp_path / "checkpoint")):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def of_another_strategy(path):
    fabric = started({})
    model, _ = set_up(fabric)
    fabric.load_raw(path, model)
    return whole(model.module)


def test_a_plain_file_is_loaded_too(ranks, tmp_path):
    model = Model()
    with torch.no_grad():
        model.net[0].weight.fill_(0.5)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    for found in run(ranks, of_another_strategy, str(tmp_path / "model.pt")):
        torch.testing.assert_close(found, whole(model), rtol=0, atol=0)


# --- errors --------------------------------------------------------------------------------------------------
def accumulate(fabric, model, optimizer):
    with fabric.no_backward_sync(model, enabled=False):
        pass
    with fabric.no_backward_sync(model, enabled=True):
        pass


def save_model_alone(fabric, model, optimizer):
    fabric.save("unused", {"model": model})


def two_optimizers(fabric, model, optimizer):
    other = Model()
    fabric.setup(other, sgd(other), sgd(other))


def model_alone(fabric, model, optimizer):
    fabric.setup_module(Model().requires_grad_(False))
    fabric.setup_module(Model())


def optimizer_alone(fabric, model, optimizer):
    fabric.setup_optimizers(sgd(Model()))


def retain_graph(fabric, model, optimizer):
    fabric.backward(model(**Samples()[:2])["loss"], retain_graph=True)


def with_filter(fabric, model, optimizer):
    fabric.save("unused", {"model": model, "optimizer": optimizer}, filter={"model": lambda name, value: True})


def tried(job, declared):
    fabric = started(declared)
    job(fabric, *set_up(fabric))


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (accumulate, "no_backward_sync: gradient_merge decides when gradients are reduced"),
        (save_model_alone, "keeps a model and its optimizer together"),
        (two_optimizers, "fabric.setup was given 2 optimizers"),
        (model_alone, "a model without its optimizer: write fabric.setup(model, optimizer)"),
        (optimizer_alone, "an optimizer alone: write fabric.setup(model, optimizer)"),
        (retain_graph, "fabric.backward with arguments for torch is not supported yet"),
        (with_filter, "a filter or storage options is not supported yet"),
    ],
    ids=lambda v: v.__name__ if callable(v) else "",
)
def test_what_a_strategy_cannot_do_is_an_error(ranks, job, message):
    assert all(message in text for text in ranks.run(error_of, tried, job, {}))


def clip_in_a_window(fabric, model, optimizer):
    train(fabric, model, optimizer, loader(fabric), max_norm=0.1)


def test_clipping_by_hand_inside_a_merge_window_is_an_error(ranks):
    texts = ranks.run(error_of, tried, clip_in_a_window, {"gradient_merge": {"k_steps": 2}})
    assert all("clip" in text and text != "no error" for text in texts)


def test_mixed_precision_of_fabric_is_an_error():
    warnings.simplefilter("ignore")  # pytest restores them
    with pytest.raises(UsageError, match=r'precision=.bf16-mixed. would run beside the strategy.*amp={"dtype"'):
        fabric_of(fleet_strategy(), devices=1, precision="bf16-mixed")


@pytest.mark.parametrize("switch", ["auto", "pipeline"])
def test_strategies_that_need_their_own_loop_are_an_error(switch):
    settings = {"pipeline": {"micro_batch_size": 1}, "auto": True}[switch]
    with pytest.raises(StrategyError, match=f"{switch} in Fabric is not supported yet"):
        fleet_strategy(fleet.DistributedStrategy(**{switch: settings}))


def test_a_dict_is_no_strategy():
    with pytest.raises(TypeError, match=r"strategy must be a fleet\.DistributedStrategy, not dict"):
        fleet_strategy({"amp": True})


# --- Fabric's own launcher -----------------------------------------------------------------------------------
def test_fabric_may_start_the_workers_itself(tmp_path):
    """`python script.py`, without fleetrun."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import torch, warnings
        warnings.simplefilter("ignore")
        from lightning.fabric import Fabric
        from fleetx import fleet
        from fleetx.integrations.fabric import FleetStrategy

        fabric = Fabric(accelerator="cpu", devices=2, strategy=FleetStrategy())
        fabric.launch()
        model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        torch.nn.init.ones_(model.weight)
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
        fabric.backward(model(torch.full((1, 1), 1.0 + fleet.worker_index(), dtype=torch.float64)).sum())
        optimizer.step()
        with open(f"found.{fleet.worker_index()}", "w") as file:
            print(fleet.worker_num(), model.weight.item(), file=file)
    """)
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"found.{rank}").read_text() for rank in range(2)] == ["2 -0.5\n"] * 2
