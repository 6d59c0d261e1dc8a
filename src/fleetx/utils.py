"""Names that Paddle scripts import from `fleet_x.utils`. The code is in `fleetx.paddle.utils`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fleetx.paddle import utils as _utils

if TYPE_CHECKING:
    from fleetx.paddle.utils import Downloader, linear_warmup_decay

__all__ = ["Downloader", "linear_warmup_decay"]


def __getattr__(name: str) -> Any:
    return getattr(_utils, name)
