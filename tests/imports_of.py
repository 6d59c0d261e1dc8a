"""What a file of fleetx imports, read from its source, however it does so."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import fleetx

SOURCE = Path(fleetx.__file__).parent
DOTTED = re.compile(r"fleetx(\.\w+)+")
IN_CODE = re.compile(r"(?:^|[;:\n])\s*(?:import|from) (fleetx(?:\.\w+)+)")  # in the string of a program
IMPORTERS = {"__import__", "import_module", "find_spec", "resolve_name", "run_module"}
LIBRARIES = {"importlib", "importlib.util", "pkgutil", "runpy", "sys"}
COMPUTED = {  # import a module whose name no constant holds: the user's, another package's, or Paddle's, made from ours
    "paddle/static/imports.py", "paddle/api/__init__.py", "record/trackers.py", "data/checks.py", "base/seams.py",
    "base/triton_kernels.py", "verify/combinations.py", "verify/own_model.py", "launch/fork_server.py",
    "launch/runner.py", "engine/plain.py", "strategy/part.py",
}  # fmt: skip


def is_module(name: str) -> bool:
    where = SOURCE.joinpath(*name.split(".")[1:])
    return where.with_suffix(".py").exists() or (where / "__init__.py").exists()


def imported_by(source: str, where: str, *, everywhere: bool = True) -> set[str]:
    """The modules that a file imports; not `everywhere`: only when it is imported itself.

    Raises AssertionError if the file hides which module it means.
    """
    tree = ast.parse(source)
    skipped = _for_type_checkers(tree)
    skipped |= {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    nodes = [node for node in (ast.walk(tree) if everywhere else tree.body) if id(node) not in skipped]
    found = {name for node in nodes for name in _named(node)} if everywhere else set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {n if is_module(n) else _home_of(n) for n in (f"{node.module}.{a.name}" for a in node.names)}
    hides = [*map(_hides, nodes), "another meaning of TYPE_CHECKING" if "TYPE_CHECKING =" in source else ""]
    if everywhere:
        whole = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
        attributes = {id(n.value) for n in whole}
        hides += [_hides_computed(node, attributes) if where not in COMPUTED else "" for node in nodes]
    assert not any(hides), f"{where}: {next(filter(None, hides))} hides which package is meant"
    return found


def _for_type_checkers(tree: ast.Module) -> set[int]:
    """Imports under `if TYPE_CHECKING` never run."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING"]
    return {id(n) for block in blocks for statement in block.body for n in ast.walk(statement)}


def _named(node: ast.AST) -> Iterator[str]:
    """Modules that are named in a string or as an attribute of the package."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        names = [node.value] if DOTTED.fullmatch(node.value) else IN_CODE.findall(node.value)
        yield from (name for name in names if is_module(name))
    elif isinstance(node, ast.Attribute) and DOTTED.fullmatch(name := _dotted(node)):
        yield name


def _home_of(name: str) -> str:
    """The module that defines a name, of which fleetx itself passes some on."""
    module, _, attribute = name.rpartition(".")
    return fleetx._WHERE.get(attribute, module) if module == "fleetx" else module


def _hides(node: ast.AST) -> str:
    if isinstance(node, ast.Import):
        return next((f"`import {a.name} as`" for a in node.names if a.asname and a.name in {*LIBRARIES, "fleetx"}), "")
    if isinstance(node, ast.ImportFrom):
        if node.level:
            return "a relative import"
        taken = {a.name for a in node.names if a.asname or a.name == "modules"} if node.module in LIBRARIES else set()
        return f"`from {node.module} import {min(taken)}`" if taken & {*IMPORTERS, "modules"} else ""
    return ""


def _hides_computed(node: ast.AST, attributes: set[int]) -> str:
    """attributes: the names that an attribute is read from."""
    if (
        isinstance(node, ast.Name)
        and node.id == "fleetx"
        and isinstance(node.ctx, ast.Load)
        and id(node) not in attributes
    ):
        return "`fleetx` as a value"
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("exec", "eval"):
        return f"{_dotted(node.func)}()"
    if isinstance(node, ast.Call) and (name := _dotted(node.func).rpartition(".")[2]) in IMPORTERS:
        given = [*node.args[:1], *(k.value for k in node.keywords if k.arg in ("name", "mod_name"))]
        plain = given and all(isinstance(g, ast.Constant) and not str(g.value).startswith(".") for g in given)
        return "" if plain and name != "resolve_name" else f"{name}() of what is computed"
    if isinstance(node, ast.Subscript) and _dotted(node.value) == "sys.modules":
        return "" if _plain(node.slice) else "sys.modules[...]"
    if isinstance(node, ast.Call) and _dotted(node.func).startswith("sys.modules."):
        return "" if node.args and _plain(node.args[0]) else "sys.modules"
    return ""


def _plain(node: ast.AST) -> bool:
    return (isinstance(node, ast.Constant) and node.value != "fleetx") or _dotted(node).startswith("seams.")


def _dotted(node: ast.AST) -> str:
    """`a.b.c`; an empty string if it begins with anything but a name."""
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return before and f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
