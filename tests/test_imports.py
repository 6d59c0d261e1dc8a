"""Who may import whom, read from the imports; and what importing costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fleetx

SOURCE = Path(fleetx.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


def imports(path):
    """Every module that a file imports at its top level, outside of `if TYPE_CHECKING`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{a.name}" for a in node.names} | {node.module or ""}
    return found


def room(path):
    return path.relative_to(SOURCE).as_posix()


TORCHLESS = ["compose.py", "strategy.py", "settings.py", "part.py", "stage.py", "roles.py", "paddle_names.py", "cli.py"]
TORCHLESS += ["bill.py", "planner/cost.py", "planner/work.py", "train_configs.py", "utils.py"]
LAUNCHER = ["launch/__init__.py", "launch/options.py", "launch/runner.py"]  # the rest loads when the agent starts


@pytest.mark.parametrize("name", TORCHLESS + LAUNCHER)
def test_declarations_and_the_launchers_front_do_not_import_torch(name):
    assert not [i for i in imports(SOURCE / name) if i.split(".")[0] == "torch"]


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name == "parts"], ids=lambda p: p.stem)
def test_parts_import_neither_the_engine_nor_each_other(path):
    forbidden = [
        i for i in imports(path) if i.startswith(("fleetx.engine", "fleetx.parts", "fleetx.fleet", "fleetx.reducer"))
    ]
    assert not forbidden


def test_the_engine_knows_no_part():
    for name in ("engine.py", "reducer.py", "compose.py", "moment.py"):
        assert not [i for i in imports(SOURCE / name) if i.startswith("fleetx.parts")]


@pytest.mark.parametrize(
    ("word", "home"),
    [("register_forward", "engine.py"), ("register_step_", "engine.py"), ("init_process_group(", "world.py")],
)
def test_one_place_for_one_thing(word, home):
    assert [room(p) for p in FILES if word in p.read_text()] == [home]


@pytest.mark.parametrize(
    "word", ["pickle.load", "yaml.full_load", "shell=True", "weights_only=False", " eval(", " exec("]
)
def test_nothing_that_runs_foreign_code(word):
    """Only the launcher's runner may: running the user's script is its purpose."""
    assert not [room(p) for p in FILES if word in p.read_text() and room(p) != "launch/runner.py"]


def test_files_are_small():
    assert not {room(p): n for p in FILES if (n := len(p.read_text().splitlines())) > 350}


def test_importing_fleetx_loads_nothing_heavy():
    code = (
        "import fleetx, sys; assert not {'torch', 'pydantic', 'rich', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_public_names_are_found():
    for name in fleetx.__all__:
        assert getattr(fleetx, name) is not None
    assert set(fleetx.__all__) <= set(dir(fleetx))
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = fleetx.nope
