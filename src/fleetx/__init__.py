"""fleetx: training with very large batches on PyTorch, by composing strategies.

    from fleetx import fleet

Importing this package is cheap: the names below are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetx import applications, data, fleet, optim, utils
    from fleetx.errors import (
        CheckpointError,
        DataError,
        DownloadError,
        FleetxError,
        LaunchError,
        NumbersError,
        StrategyError,
        UsageError,
        VersionError,
        WorldError,
    )
    from fleetx.optim import schedule
    from fleetx.paddle.train_configs import parse_train_configs
    from fleetx.paddle.trainer import MultiGPUTrainer
    from fleetx.strategy import DistributedStrategy

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "DataError",
    "DistributedStrategy",
    "DownloadError",
    "FleetxError",
    "LaunchError",
    "MultiGPUTrainer",
    "NumbersError",
    "StrategyError",
    "UsageError",
    "VersionError",
    "WorldError",
    "applications",
    "data",
    "fleet",
    "optim",
    "parse_train_configs",
    "schedule",
    "utils",
]
_MODULES = ("applications", "data", "fleet", "optim", "schedule", "utils")
_WHERE = {
    **{name: "fleetx.errors" for name in __all__ if name.endswith("Error")},
    "DistributedStrategy": "fleetx.strategy",
    "MultiGPUTrainer": "fleetx.paddle.trainer",
    "Trainer": "fleetx.paddle.trainer",
    "parse_train_configs": "fleetx.paddle.train_configs",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"fleetx.{name}")
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name.startswith("_"):  # Python and tools probe for such names
        raise AttributeError(f"module 'fleetx' has no attribute {name!r}")
    from fleetx.applications.not_covered import of_fleetx

    raise AttributeError(of_fleetx("fleetx", name, __all__))


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
