from __future__ import annotations

import sys
from pathlib import Path
from weakref import WeakValueDictionary

import pytest

from fleetx.paddle.static import programs

# For small_applications and data_files, which the tests of those packages use too.
sys.path += [str(Path(__file__).parents[2] / folder) for folder in ("applications", "data")]


@pytest.fixture(autouse=True)
def _nothing_in_use(monkeypatch):
    """Start every test with no model in use."""
    monkeypatch.setattr(programs, "_last_minimized", None)
    monkeypatch.setattr(programs, "_in_use", WeakValueDictionary())
