"""Ranks that live for the whole test run."""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import torch

from fleetx.comm import session
from fleetx.verify.ranks import RankError
from fleetx.verify.ranks import Ranks as Pool

__all__ = ["RankError", "Ranks", "forget", "forks"]


class Ranks(Pool):
    def __init__(self, size: int):
        super().__init__(size, before=_fresh, start_method=forks())


def forks() -> str:
    """The start method whose processes are forks of a server that has done nothing but imports.

    A process that trains imports for four seconds, half of it at its first step (`torch._dynamo`). The server imports
    once what this process has imported.
    """
    packages = {"fleetx", "torch", "transformers", "pytest", "hypothesis"}
    imported = [name for name in list(sys.modules) if name.partition(".")[0] in packages]
    multiprocessing.set_forkserver_preload([*imported, "torch._dynamo", "torch.testing", "frozen_imports"])
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()
    return "forkserver"


def forget() -> None:
    """Give every test a session that knows no world and no model."""
    session.reset()


def _fresh() -> None:
    forget()
    torch.manual_seed(0)
    warnings.simplefilter("error")
