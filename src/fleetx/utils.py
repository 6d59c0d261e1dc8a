"""Names that Paddle scripts use as `X.utils`, such as `X.utils.Downloader().download_from_bos(...)`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fleetx.paddle.download.downloader import Downloader, ImageNetDownloader, WikiDataDownloader, WMTDataDownloader

if TYPE_CHECKING:
    from fleetx.optim.schedule import linear_warmup_decay

__all__ = ["Downloader", "ImageNetDownloader", "WMTDataDownloader", "WikiDataDownloader", "linear_warmup_decay"]


def __getattr__(name: str) -> Any:
    if name == "linear_warmup_decay":  # on first use: downloading does not need torch
        from fleetx.optim import schedule

        return schedule.linear_warmup_decay
    raise AttributeError(f"fleetx.utils has no {name!r}: it has {', '.join(__all__)}")
