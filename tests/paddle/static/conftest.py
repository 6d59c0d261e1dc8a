from __future__ import annotations

import sys
from pathlib import Path
from weakref import WeakValueDictionary

import pytest

from fleetx.paddle.static import programs

# Small applications and files of every format, which their own tests are made of.
sys.path += [str(Path(__file__).parents[1] / room) for room in ("applications", "data")]


@pytest.fixture(autouse=True)
def _nothing_in_use(monkeypatch):
    """Give every test a front that knows of no model."""
    monkeypatch.setattr(programs, "_described_last", None)
    monkeypatch.setattr(programs, "_in_use", WeakValueDictionary())
