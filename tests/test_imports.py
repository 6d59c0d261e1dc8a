"""Which package may import which, read from the source; and what importing costs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fleetx
from imports_of import SOURCE, imported_by

FILES = sorted(SOURCE.rglob("*.py"))
MAP = (Path(__file__).parent.parent / "docs/design/architecture.md").read_text()

# A package imports only packages to its left. docs/design/architecture.md draws the same list.
PACKAGES = [
    "errors", "base", "strategy", "comm", "optim", "engine", "record", "measure", "parts", "planner", "data", "fleet",
    "applications", "paddle", "integrations", "verify", "report", "launch", "cli",
]  # fmt: skip
FRONT = {"__init__.py", "schedule.py", "static.py", "utils.py"}  # public names: they point at the packages

ALLOWED = {
    # The worker process, not fleetrun itself, runs the user's script, which may be one for Paddle.
    ("launch/runner.py", "fleetx.paddle.static"),
    # A process of its own, from which workers are forked.
    ("launch/fork_server.py", "fleetx.fleet"),
    ("launch/fork_server.py", "fleetx.engine.checkpoint"),
    # The folder is searched, so that a new part needs no list.
    ("strategy/part.py", "fleetx.parts"),
}


def place(path):
    return path.relative_to(SOURCE).as_posix()


def package(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def module_of(path):
    return ".".join(("fleetx", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


def imports(path, *, everywhere=True):
    """What a file imports: in functions too, as an attribute of the package, and by a name in a string."""
    return imported_by(path.read_text(), place(path), everywhere=everywhere)


@pytest.mark.parametrize(
    "source",
    [
        "import fleetx.fleet",
        "from fleetx import fleet",
        "def f():\n    from fleetx.fleet import init",
        "if not TYPE_CHECKING:\n    import fleetx.fleet",
        "__import__('fleetx.fleet')",
        "LATER = ['fleetx.fleet']",
        "if 'fleetx.fleet' in sys.modules: pass",
        "sys.modules['fleetx.fleet'].init()",
        "import fleetx\nfleetx.fleet.init()",
        "subprocess.run([sys.executable, '-c', 'import sys; from fleetx.fleet import init'])",
    ],
)
def test_every_way_to_import_is_seen(source):
    assert any(name.startswith("fleetx.fleet") for name in imported_by(source, "here"))


@pytest.mark.parametrize(
    "source",
    [
        "import fleetx as f\nf.fleet.init()",
        "import fleetx\ngetattr(fleetx, 'fleet')",
        "import fleetx\nf = fleetx\nf.fleet.init()",
        "import_module(f'fleetx.{name}')",
        "importlib.import_module('fleetx.' + name)",
        "importlib.import_module(name='fleetx.' + name)",
        "importlib.import_module('.fleet', 'fleetx')",
        "from importlib import import_module as load",
        "import importlib as i",
        "pkgutil.resolve_name('fleetx.fleet:init')",
        "exec('import ' + name)",
        "sys.modules['fleetx'].fleet.init()",
        "sys.modules[name].init()",
        "sys.modules.get('fleetx.' + name)",
        "from sys import modules",
        "from . import fleet",
        "TYPE_CHECKING = True\nif TYPE_CHECKING:\n    import fleetx.fleet",
    ],
)
def test_imports_that_cannot_be_seen_fail(source):
    with pytest.raises(AssertionError, match="here:"):
        imported_by(source, "here")


def test_a_name_that_fleetx_passes_on_counts_where_it_is_defined():
    assert imported_by("from fleetx import Trainer", "here") == {"fleetx.paddle.trainer"}


def test_imports_for_type_checkers_only_do_not_count():
    assert not imported_by("if TYPE_CHECKING:\n    import fleetx.fleet", "here")


def test_every_file_is_in_a_package():
    assert {package(p) for p in FILES if place(p) not in FRONT} == set(PACKAGES)


@pytest.mark.parametrize("name", [n for n in PACKAGES if (SOURCE / n).is_dir()])
def test_the_map_names_every_file_of_a_package(name):
    """In docs/design/architecture.md, where a folder is written with a slash."""
    entry = re.search(rf"^    {name}/ +(.*(?:\n     .*)*)", MAP, re.M).group(1)
    files = {p.relative_to(SOURCE / name).parts[0] for p in FILES if package(p) == name and p.parent != SOURCE}
    public = set() if name != "parts" else {f for f in files if not f.startswith("_")}  # one for each strategy
    names = {f.removesuffix(".py") if f.endswith(".py") else f"{f}/" for f in files - public} - {"__init__", "__main__"}
    missing = {n for n in names if not re.search(rf"(?<![\w.]){n}(?!\w)", entry)}
    assert not missing, f"name {', '.join(sorted(missing))} in the entry of {name}/ in docs/design/architecture.md"


@pytest.mark.parametrize("path", [p for p in FILES if place(p) not in FRONT], ids=place)
def test_a_package_imports_only_packages_above_it(path):
    ours = {i for i in imports(path) if i.startswith("fleetx.") and (place(path), i) not in ALLOWED}
    below = [i for i in ours if PACKAGES.index(i.split(".")[1]) > PACKAGES.index(package(path))]
    assert not below, f"{place(path)} imports {', '.join(below)}, which is below {package(path)}/"


@pytest.mark.parametrize("path", [p for p in FILES if package(p) == "launch"], ids=place)
def test_the_launcher_imports_only_errors_and_base(path):
    packages = {i.split(".")[1] for i in imports(path) if i.startswith("fleetx.") and (place(path), i) not in ALLOWED}
    assert packages <= {"launch", "errors", "base"}


@pytest.mark.parametrize("path", [p for p in FILES if package(p) == "parts"], ids=place)
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
    ("word", "homes"),
    [(r"\.register_(?!comm_)\w*hook\(", ["engine/engine.py", "engine/scheduled.py", "engine/state.py"]),
     (r"init_process_group\(", ["comm/join.py"]), ("get_close_matches", ["base/suggest.py"]),
     (r"warnings\.warn", ["base/user_line.py"])],
    ids=["hooks", "process group", "suggestions", "warnings"],
)  # fmt: skip
def test_one_place_for_one_thing(word, homes):
    # `verify` looks on from outside: it starts ranks and watches them itself.
    assert [place(p) for p in FILES if re.search(word, p.read_text()) and package(p) != "verify"] == homes


def test_one_name_for_one_class():
    """Two classes of one name, or a class and the name of a type, are two meanings of one word."""
    homes = {}
    for path in FILES:
        if place(path).startswith("paddle/"):  # the names are Paddle's
            continue
        for name in re.findall(r"^(?:class _?|_?(?=[A-Z]\w* = [\w.]+[\[|]))([A-Z]\w*[a-z]\w*)", path.read_text(), re.M):
            homes.setdefault(name.lower(), []).append(place(path))
    assert not {name: where for name, where in homes.items() if len(where) > 1}


def test_files_are_small():
    long = {place(p): n for p in FILES if (n := len(p.read_text().splitlines())) > 350}
    assert not long, f"{long}: split it: the limit is 350 lines"


def test_importing_fleetx_loads_nothing_heavy():
    code = (
        "import fleetx, sys; assert not {'torch', 'pydantic', 'rich', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def test_declaring_a_strategy_does_not_load_torch():
    code = "import fleetx.strategy, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def test_the_public_names_are_found():
    for name in fleetx.__all__:
        assert getattr(fleetx, name) is not None
    assert set(fleetx.__all__) <= set(dir(fleetx))
    with pytest.raises(AttributeError, match="fleetx has no 'nope'"):
        _ = fleetx.nope
