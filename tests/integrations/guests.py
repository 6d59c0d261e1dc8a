"""What the tests of other libraries share: tiny models in float64, and ranks as the libraries expect them."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from fleetx import FleetxError
from training import net

SAME = {"rtol": 1e-11, "atol": 1e-12}


class Samples(torch.utils.data.Dataset):
    def __init__(self, n=24):
        g = torch.Generator().manual_seed(1)
        self.x = torch.randn(n, 6, generator=g, dtype=torch.float64)
        self.y = torch.randn(n, 3, generator=g, dtype=torch.float64)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.y[i]}


class Model(nn.Module):
    """Returns its loss, as models of transformers do. Draws random numbers if there is dropout."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.net, self.dropout = net().double(), nn.Dropout(dropout)

    def forward(self, x, labels):
        out = self.dropout(self.net(x))
        return {"loss": mse_loss(out, labels), "logits": out}


def whole(model):
    return {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for k, v in model.state_dict().items()}


def as_launched(job, *args):
    """Run a job with the variables of a launcher; the libraries' own warnings are not what the tests are about."""
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
        as_launched(job, *args)
    except FleetxError as error:
        return str(error)
    return "no error"
