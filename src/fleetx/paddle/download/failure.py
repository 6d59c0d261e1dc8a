"""What can go wrong on the way."""

from __future__ import annotations

import shutil
from pathlib import Path

from fleetx.errors import DownloadError
from fleetx.paddle.download.progress import amount


class Dropped(Exception):  # noqa: N818  not an error of the user's: the connection failed, and another try may help
    """Never leaves this package: the last try makes a DownloadError of it."""


class Stopped(Exception):  # noqa: N818  nor this: the main thread was interrupted and the others end early
    """Never leaves this package."""


def refuse_if_full(folder: Path, needed: int, what: str, *, hint: str = "") -> None:
    """`what` needs so many bytes."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DownloadError(f"{what} {amount(needed)}, but the disk of {folder} has {amount(free)} left{hint}")
