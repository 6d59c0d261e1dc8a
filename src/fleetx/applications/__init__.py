"""Models that are ready to train: `Resnet50`, `VGG16`, `BertBase`, `BertLarge`, `Transformer`.

The other BERTs are names of FleetX.

They have fresh weights; nothing is downloaded. Called with a batch as keyword arguments, each returns its loss.
"""

from __future__ import annotations

from typing import Any

from fleetx.applications.application import Application
from fleetx.applications.bert import Bert_base, Bert_large, BertBase, BertGiant, BertHuge, BertLarge
from fleetx.applications.bert import FirstBert as Bert
from fleetx.applications.images import VGG16, Resnet50
from fleetx.applications.not_covered import of_fleetx
from fleetx.applications.program import Parameter, Program, Variable
from fleetx.applications.transformer import Transformer

__all__ = [
    "VGG16",
    "Application",
    "Bert",
    "BertBase",
    "BertGiant",
    "BertHuge",
    "BertLarge",
    "Bert_base",
    "Bert_large",
    "Parameter",
    "Program",
    "Resnet50",
    "Transformer",
    "Variable",
]


def __getattr__(name: str) -> Any:
    if name == "linear_warmup_decay":  # where FleetX had it at first
        from fleetx.optim.schedule import linear_warmup_decay

        return linear_warmup_decay
    raise AttributeError(of_fleetx(__name__, name, __all__))
