"""Which room may import which, read from the source; and what importing costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fleetx

SOURCE = Path(fleetx.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# A room imports only rooms to its left. docs/design/architecture.md draws the same list.
ROOMS = [
    "errors", "base", "strategy", "comm", "optim", "engine", "measure", "parts", "planner", "fleet", "data",
    "applications", "paddle", "launch", "cli",
]  # fmt: skip
FRONT = {"__init__.py", "schedule.py", "static.py", "utils.py"}  # public names: they point at the rooms

# The worker process, not fleetrun itself, runs the user's script, which may be one for Paddle.
ALLOWED = {("launch/runner.py", "fleetx.paddle.static")}


def place(path):
    return path.relative_to(SOURCE).as_posix()


def room(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def module_of(path):
    return ".".join(("fleetx", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


def is_module(name):
    where = SOURCE.joinpath(*name.split(".")[1:])
    return where.with_suffix(".py").exists() or (where / "__init__.py").exists()


def type_checking(tree):
    """Imports under `if TYPE_CHECKING` are for type checkers only and never run."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    return {id(n) for block in blocks for statement in block.body for n in ast.walk(statement)}


def imports(path, *, everywhere=True):
    """What a file imports: in functions too, by importlib and by looking into sys.modules."""
    tree = ast.parse(path.read_text())
    skipped = type_checking(tree)
    found = set()
    for node in ast.walk(tree) if everywhere else tree.body:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{place(path)}: relative imports hide which room is meant"
            names = {f"{node.module}.{a.name}" for a in node.names}
            found |= {n if is_module(n) else node.module for n in names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "sys.modules.get")):
            found |= {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "sys.modules":
            found |= {n.value for n in ast.walk(node.slice) if isinstance(n, ast.Constant)}
    return found


def test_every_file_is_in_a_room():
    assert {room(p) for p in FILES if place(p) not in FRONT} == set(ROOMS)


@pytest.mark.parametrize("path", [p for p in FILES if place(p) not in FRONT], ids=place)
def test_a_room_imports_only_rooms_above_it(path):
    ours = {i for i in imports(path) if i.startswith("fleetx.") and (place(path), i) not in ALLOWED}
    below = [i for i in ours if ROOMS.index(i.split(".")[1]) > ROOMS.index(room(path))]
    assert not below, f"{place(path)} imports {', '.join(below)}, which is below {room(path)}/"


@pytest.mark.parametrize("path", [p for p in FILES if room(p) == "launch"], ids=place)
def test_the_launcher_imports_only_errors_and_base(path):
    rooms = {i.split(".")[1] for i in imports(path) if i.startswith("fleetx.") and (place(path), i) not in ALLOWED}
    assert rooms <= {"launch", "errors", "base"}


@pytest.mark.parametrize("path", [p for p in FILES if room(p) == "parts"], ids=place)
def test_parts_never_import_each_other(path):
    mine = path.relative_to(SOURCE).parts[1].removesuffix(".py")
    others = {i.split(".")[2] for i in imports(path) if i.startswith("fleetx.parts.")}
    assert {o for o in others if not o.startswith("_")} <= {mine}


TORCHLESS = ["strategy", "comm/roles.py", "planner/cost.py", "planner/model_profile.py", "paddle/train_configs.py"]
TORCHLESS += ["utils.py", "cli.py", "errors.py", "base/suggest.py", "base/files.py"]
LAUNCHER = ["launch/__init__.py", "launch/options.py", "launch/runner.py"]  # the rest loads when the agent starts


@pytest.mark.parametrize("name", TORCHLESS + LAUNCHER)
def test_declarations_and_the_launchers_front_do_not_import_torch(name):
    files = [SOURCE / name] if name.endswith(".py") else sorted((SOURCE / name).rglob("*.py"))
    for path in files:
        assert not [i for i in imports(path, everywhere=False) if i.split(".")[0] == "torch"], place(path)


@pytest.mark.parametrize(
    ("word", "home"),
    [("register_forward", "engine/engine.py"), ("register_step_", "engine/engine.py"),
     ("init_process_group(", "comm/world.py"), ("get_close_matches", "base/suggest.py")],
)  # fmt: skip
def test_one_place_for_one_thing(word, home):
    assert [place(p) for p in FILES if word in p.read_text()] == [home]


def test_one_name_for_one_class():
    """Two public classes of one name are two meanings of one word."""
    homes = {}
    for path in FILES:
        if place(path).startswith("paddle/api"):  # the names are Paddle's
            continue
        for name in re.findall(r"^class ([A-Z]\w*)", path.read_text(), re.M):
            homes.setdefault(name, []).append(place(path))
    assert not {name: where for name, where in homes.items() if len(where) > 1}


@pytest.mark.parametrize(
    "word", ["pickle.load", "yaml.full_load", "shell=True", "weights_only=False", " eval(", " exec("]
)
def test_nothing_that_runs_foreign_code(word):
    """Only the launcher's runner may: running the user's script is its purpose."""
    assert not [place(p) for p in FILES if word in p.read_text() and place(p) != "launch/runner.py"]


def test_files_are_small():
    assert not {place(p): n for p in FILES if (n := len(p.read_text().splitlines())) > 350}


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
