"""Libraries that also manage the model: one clear error if they wrap it, and the ways that work equal one process."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from fleetx import FleetxError, fleet
from training import net, sgd

STEPS, SAME = 6, {"rtol": 1e-12, "atol": 1e-12}
STRATEGIES = [{}, {"gradient_merge": {"k_steps": 2}}, {"sharding": True}]
every_strategy = pytest.mark.parametrize("declared", STRATEGIES, ids=["nothing", "merge", "sharding"])
TWICE = "DistributedDataParallel around a distributed model would manage its gradients a second time"


class Samples(torch.utils.data.Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(1)
        self.x = torch.randn(4 * STEPS, 6, generator=g, dtype=torch.float64)
        self.y = torch.randn(4 * STEPS, 3, generator=g, dtype=torch.float64)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.y[i]}


class Model(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.net = net().double()

    def forward(self, x, labels):
        out = self.net(x)
        return {"loss": mse_loss(out, labels), "logits": out}


def whole(model):
    return {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for k, v in model.state_dict().items()}


def plain(declared):
    """One process on the whole batch."""
    k = declared.get("gradient_merge", {}).get("k_steps", 1)
    model, samples = Model(), Samples()
    optimizer = sgd(model)
    for x, y in zip(samples.x.split(4 * k), samples.y.split(4 * k), strict=True):
        model(x, y)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def mine(number):
    """This rank's half of a batch."""
    first = 4 * number + 2 * fleet.worker_index()
    return Samples()[slice(first, first + 2)]


def distributed(declared):
    fleet.init()
    model = Model()
    return fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))


def quietly(job, *args):
    """The libraries warn of their own affairs, and find the ranks in torchrun's variables."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    found = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "0", "GROUP_RANK": "0"}
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        for name, value in found.items():
            patch.setenv(name, value)
        return job(*args)


def error_of(job, *args):
    try:
        quietly(job, *args)
    except FleetxError as error:
        return str(error)
    return "no error"


def equal_one_process(ranks, declared, job):
    for found in ranks.run(quietly, job, declared):
        torch.testing.assert_close(found, plain(declared), **SAME)


# --- accelerate ----------------------------------------------------------------------------------------
def accelerator():
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def prepared_after(declared):
    accelerator().prepare(*distributed(declared))


def prepared_before(declared):
    fleet.init()
    model = Model()
    model, optimizer = accelerator().prepare(model, sgd(model))
    fleet.distribute(model, optimizer, fleet.DistributedStrategy(**declared))


@every_strategy
def test_accelerate_may_not_prepare_the_model(ranks, declared):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    assert all(TWICE in text for text in ranks.run(error_of, prepared_after, declared))
    for text in ranks.run(error_of, prepared_before, declared):
        assert "wrapped in DistributedDataParallel, which fleetx replaces: pass the plain model" in text
        assert "AcceleratedOptimizer wraps another optimizer and runs no hooks of its own: pass the wrapped one" in text


def prepared_optimizer(declared):
    """accelerate has the optimizer and the backward, fleetx the model."""
    model, optimizer = distributed(declared)
    library = accelerator()
    optimizer = library.prepare(optimizer)
    for number in range(STEPS):
        library.backward(model(**mine(number))["loss"])
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


@every_strategy
def test_accelerate_may_prepare_the_optimizer(ranks, declared):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    equal_one_process(ranks, declared, prepared_optimizer)


# --- transformers.Trainer ------------------------------------------------------------------------------
def trainer(declared, folder, wraps):
    from transformers import Trainer, TrainingArguments

    model, optimizer = distributed(declared)
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=2, num_train_epochs=1, use_cpu=True, lr_scheduler_type="constant",
        max_grad_norm=0.0, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    made = Trainer(model=model, args=arguments, train_dataset=Samples(), optimizers=(optimizer, None))
    if not wraps:  # as docs/results/public_scripts.md says
        made.accelerator.prepare_model = lambda model, *args, **kwargs: model
        made._wrap_model = lambda model, *args, **kwargs: model
    made.train()
    return whole(model)


@every_strategy
def test_a_trainer_that_wraps_the_model_is_an_error(ranks, declared, tmp_path):
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate, which is not installed")
    assert all(TWICE in text for text in ranks.run(error_of, trainer, declared, str(tmp_path), True))


@every_strategy
def test_a_trainer_that_does_not_wrap_equals_one_process(ranks, declared, tmp_path):
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate, which is not installed")
    for found in ranks.run(quietly, trainer, declared, str(tmp_path), False):
        torch.testing.assert_close(found, plain(declared), **SAME)


# --- Lightning Fabric ----------------------------------------------------------------------------------
def fabric(devices=2, **options):
    from lightning.fabric import Fabric

    made = Fabric(accelerator="cpu", devices=devices, **options)
    made.launch()
    return made


def set_up_after(declared):
    library = fabric(strategy="ddp")
    library.setup(*distributed(declared))


def set_up_before(declared):
    fleet.init()
    model = Model()
    model, optimizer = fabric(strategy="ddp").setup(model, sgd(model))
    fleet.distribute(model, optimizer, fleet.DistributedStrategy(**declared))


@every_strategy
def test_fabric_may_not_set_up_the_model(ranks, declared):
    pytest.importorskip("lightning", reason="lightning is not installed")
    assert all(TWICE in text for text in ranks.run(error_of, set_up_after, declared))
    for text in ranks.run(error_of, set_up_before, declared):
        assert "contains DistributedDataParallel, which fleetx replaces: pass the plain model" in text
        assert "wraps another optimizer and runs no hooks of its own: pass the wrapped one" in text


def fabric_of_one(declared):
    """Fabric knows of one process, and has nothing to reduce."""
    model, optimizer = distributed(declared)
    library = fabric(1)
    outer, optimizer = library.setup(model, optimizer)
    for number in range(STEPS):
        library.backward(outer(**mine(number))["loss"])
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


@every_strategy
def test_fabric_of_one_device_equals_one_process(ranks, declared):
    pytest.importorskip("lightning", reason="lightning is not installed")
    equal_one_process(ranks, declared, fabric_of_one)
