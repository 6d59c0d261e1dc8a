"""Models that are ready to train: `Resnet50`, `VGG16`, `BertBase`, `BertLarge`, `Transformer`.

Built from their sizes, with fresh weights: nothing is downloaded. Called with a batch by name, each returns its loss.
"""

from __future__ import annotations

import difflib
from typing import Any

from fleetx.applications.application import Application
from fleetx.applications.bert import Bert_base, Bert_large, BertBase, BertLarge
from fleetx.applications.images import VGG16, Resnet50
from fleetx.applications.program import Parameter, Program, Variable
from fleetx.applications.transformer import Transformer

__all__ = [
    "VGG16",
    "Application",
    "BertBase",
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
    near = difflib.get_close_matches(name, __all__, n=1)
    hint = f": did you mean {near[0]!r}?" if near else ""
    raise AttributeError(f"fleetx.applications has no {name!r}{hint}")
