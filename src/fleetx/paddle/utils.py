"""The old system's `X.utils`, under the names that its scripts use: `X.utils.Downloader().download_from_bos(...)`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fleetx.paddle.download import Downloader

if TYPE_CHECKING:
    from fleetx.optim.schedule import linear_warmup_decay

__all__ = ["Downloader", "linear_warmup_decay"]


def __getattr__(name: str) -> Any:
    if name == "linear_warmup_decay":  # who downloads need not wait for torch
        from fleetx.optim import schedule

        return schedule.linear_warmup_decay
    raise AttributeError(f"fleetx.utils has no {name!r}: there are {', '.join(__all__)}")
