"""The lists of layers.py name tests that exist: a test that is renamed must not leave its layer unnoticed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from layers import LONG, NIGHTLY, NIGHTLY_CASES, SLOW

HERE = Path(__file__).parent
FILES = [path.relative_to(HERE).as_posix() for path in HERE.rglob("test_*.py")]


@pytest.mark.parametrize("name", [*NIGHTLY, *NIGHTLY_CASES])
def test_what_is_nightly_exists(name):
    file, _, test = name.partition("::")
    found = [path for path in FILES if path.startswith(file)]
    assert found
    assert any(re.search(rf"^def {test}", (HERE / path).read_text(), re.M) for path in found)


@pytest.mark.parametrize("name", SLOW)
def test_what_is_slow_exists(name):
    assert any(f"/{name}" in f"/{path}" for path in FILES)


@pytest.mark.parametrize("name", LONG)
def test_what_is_long_exists(name):
    assert any(path.startswith(name) for path in FILES)
