"""Ranks that live for the whole test run."""

from __future__ import annotations

import warnings

import torch

from fleetx.comm import session
from fleetx.verify.ranks import RankError
from fleetx.verify.ranks import Ranks as Pool

__all__ = ["RankError", "Ranks", "forget"]


class Ranks(Pool):
    def __init__(self, size: int):
        super().__init__(size, before=_fresh)


def forget() -> None:
    """Give every test a session that knows no world and no model."""
    session.reset()


def _fresh() -> None:
    forget()
    torch.manual_seed(0)
    warnings.simplefilter("error")
