"""The lists of layers.py name tests that exist: a test that is renamed must not leave its layer unnoticed."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from layers import LONG, NIGHTLY, PRODUCTS, SLOW, left_out

HERE = Path(__file__).parent
FILES = [path.relative_to(HERE).as_posix() for path in HERE.rglob("test_*.py")]


def repeated(names):
    return {name for name, count in Counter(names).items() if count > 1}


@pytest.mark.parametrize("name", [*NIGHTLY, *PRODUCTS])
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


def test_a_product_keeps_every_value_of_every_parameter():
    cases = {f"{a}{b}": (a, b) for a in "abc" for b in "xy"}
    kept = cases.keys() - left_out(cases)
    assert len(kept) == 3
    assert {letter for name in kept for letter in name} == set("abcxy")
    many = {f"{a}{b}": (a, b) for a in "abcd" for b in "xy"}
    assert sorted(name[1] for name in many.keys() - left_out(many)) == list("xxyy")


def test_names_of_test_files_are_unique():
    """Without packages, pytest imports two files of one name as one module, and then `make nightly` stops."""
    assert not repeated(Path(path).name for path in FILES)


def test_functions_of_a_test_file_have_different_names():
    """The second would replace the first, which would silently never run."""
    for path in FILES:
        tree = ast.parse((HERE / path).read_text())
        for scope in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
            assert not repeated(node.name for node in scope.body if isinstance(node, ast.FunctionDef)), path
