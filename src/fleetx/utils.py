"""The old system's `X.utils`, under the name that its scripts use: `X.utils.Downloader().download_from_bos(...)`."""

from __future__ import annotations

from fleetx.download import Downloader

__all__ = ["Downloader"]
