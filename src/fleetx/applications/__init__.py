"""Ready-to-train models: `Resnet50`, `VGG16`, `BertBase`, `BertLarge`, `Transformer`.

The other BERT names come from FleetX.

Models start with random weights; nothing is downloaded. Called with a batch as keyword arguments, a model returns its
loss and metrics.
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
    if name == "linear_warmup_decay":  # where early versions of FleetX had it
        from fleetx.optim.schedule import linear_warmup_decay

        return linear_warmup_decay
    raise AttributeError(of_fleetx(__name__, name, __all__))
