"""Lightning's Trainer, as docs/integrations.md says: fleetrun starts the workers, and each Trainer has one device."""

from __future__ import annotations

import re
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from guests import SAME, Model, Samples, as_launched, whole
from torch.utils.data import DataLoader, DistributedSampler

from fleetx import fleet
from training import sgd

# Its import takes seconds, so only tests import it: every pytest worker imports this file.
pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")


def trained(declared):
    import lightning
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = Model()

        def forward(self, x, labels):
            return self.inner(x, labels)

        def training_step(self, batch, number):
            return self(**batch)["loss"]

        def configure_optimizers(self):
            return fleet.distribute(self, sgd(self), fleet.DistributedStrategy(**declared))[1]

    fleet.init()
    data = Samples(24)
    sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index(), shuffle=False)
    trainer = lightning.Trainer(
        strategy=SingleDeviceStrategy(fleet.device()), max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, barebones=False,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, DataLoader(data, batch_size=2, sampler=sampler))
    return whole(module.inner)


def plain(k):
    model, data = Model(), Samples(24)
    optimizer = sgd(model)
    for x, y in zip(data.x.split(4 * k), data.y.split(4 * k), strict=True):
        model(x, y)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


@pytest.mark.parametrize("declared", [{}, {"gradient_merge": {"k_steps": 2}}], ids=["nothing", "merge"])
def test_a_trainer_of_one_device_per_worker_equals_one_process(ranks, declared):
    for found in ranks.run(as_launched, trained, declared):
        torch.testing.assert_close(found, plain(2 if declared else 1), **SAME)


def test_the_script_of_the_page_trains(tmp_path, monkeypatch):
    """docs/coming_from_lightning.md, in one process."""
    import lightning

    page = Path(__file__).parents[2] / "docs" / "coming_from_lightning.md"
    (text,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
    space = {"lightning": lightning, "torch": torch, "fleet": fleet, "data": data}
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(text, space)
    assert space["trainer"].global_step == 8
