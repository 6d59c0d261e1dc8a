"""The private names of torch that fleetx uses: that they are as we know them, and that only seams.py has any."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch

import fleetx
from fleetx.base import seams
from fleetx.errors import VersionError

SOURCE = Path(fleetx.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
HOME = SOURCE / "base/seams.py"


def private(name):
    return name.startswith("_") and not name.startswith("__")


# --- torch is as we know it -----------------------------------------------------------------------
def exists(seam):
    try:
        owner = seam.owner
    except (ImportError, AttributeError):
        return False
    if hasattr(owner, seam.name):
        return True
    # Set on each object by the class or, for a flag that one module sets on another's object, by the module.
    text = inspect.getsource(inspect.getmodule(owner))
    return bool(re.search(rf"[.\"']{seam.name}\b", text))


def parameters(target):
    """Names of parameters, and those that must be passed. None if torch does not tell."""
    try:
        found = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        found = None
    if found is not None and [p.name for p in found] != ["args", "kwargs"]:
        found = [p for p in found if p.name != "self"]
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return {p.name for p in found}, {p.name for p in found if p.default is p.empty and p.kind not in variadic}
    packet = getattr(torch.ops.aten, getattr(target, "__name__", ""), None)
    if packet is None:
        return None
    every = [getattr(packet, name)._schema.arguments for name in packet.overloads()]
    return {a.name for args in every for a in args}, set()


def complaint(name):
    """What torch has changed, in one sentence; empty if nothing."""
    seam = seams.SEAMS[name]
    say = f"torch {torch.__version__} has changed {seam.place.replace(':', '.')}, which fleetx needs ({seam.why})"
    if not exists(seam):
        return f"{say}: it is gone"
    if seam.takes is None:
        return ""
    known = parameters(getattr(seam.owner, seam.name))
    ours = set(re.findall(r"\w+", seam.takes))
    if known is None:
        return ""
    if gone := ours - known[0]:
        return f"{say}: it no longer takes {', '.join(sorted(gone))}"
    if new := known[1] - ours:
        return f"{say}: it also needs {', '.join(sorted(new))}"
    return ""


@pytest.mark.parametrize("name", seams.SEAMS)
def test_torch_has_each_private_name_with_the_signature_that_is_used(name):
    assert not complaint(name), complaint(name)


def test_a_change_of_torch_is_told_in_one_sentence(monkeypatch):
    gone = seams.Seam("torch.utils.checkpoint:_no_such_hook", "saves nothing inside a segment", "frame")
    other = seams.Seam("torch.utils.checkpoint:_checkpoint_hook", "saves nothing inside a segment", "frame, level")
    fewer = seams.Seam("torch.utils.checkpoint:_checkpoint_hook", "saves nothing inside a segment", "")
    monkeypatch.setattr(seams, "SEAMS", {"gone": gone, "other": other, "fewer": fewer})
    needs = "which fleetx needs (saves nothing inside a segment)"
    has_changed = f"torch {torch.__version__} has changed torch.utils.checkpoint."
    assert complaint("gone") == f"{has_changed}_no_such_hook, {needs}: it is gone"
    assert complaint("other") == f"{has_changed}_checkpoint_hook, {needs}: it no longer takes level"
    assert complaint("fewer") == f"{has_changed}_checkpoint_hook, {needs}: it also needs frame"


def derived():
    """Our classes that derive from torch's, with the private members that they replace."""
    for path in FILES:
        text = path.read_text()
        if not re.search(r"^class \w+\(", text, re.M) or not re.search(r"torch|seams", text):
            continue
        name = ".".join(("fleetx", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        module = importlib.import_module(name)
        for kind in vars(module).values():
            if inspect.isclass(kind) and kind.__module__ == name:
                for parent in kind.__mro__[1:]:
                    if parent.__module__.startswith("torch"):
                        for member in set(vars(kind)) & set(vars(parent)):
                            if private(member) and member not in ("_abc_impl", "_backward_cls"):
                                yield kind, parent, member


def test_every_private_method_that_a_subclass_replaces_is_listed_and_takes_what_torch_passes():
    listed = {s.name: s for s in seams.SEAMS.values() if s.overridden}
    found = set()
    for kind, parent, member in derived():
        assert member in listed, (
            f"{kind.__module__}.{kind.__name__} replaces {parent.__name__}.{member}: list it in seams"
        )
        found.add(member)
        ours = inspect.signature(getattr(kind, member)).parameters.values()
        takes_any = {p.kind for p in ours} >= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
        theirs = list(inspect.signature(getattr(parent, member)).parameters)
        assert takes_any or [p.name for p in ours] == theirs, f"{kind.__name__}.{member} does not take {theirs}"
    methods = {name for name, seam in listed.items() if seam.takes is not None}
    assert methods <= found, f"listed in seams but not replaced by any class: {methods - found}"


# --- and only seams.py knows it -------------------------------------------------------------------
def on_self(attribute):
    return isinstance(attribute.value, ast.Name) and attribute.value.id in ("self", "cls")


# Of Python's named tuples, and attributes that our strategies make by name.
ELSEWHERE = {"_replace", "_asdict", "_fields", "_notes", "_ignored", "_switches"}


@functools.cache
def ours():
    """Private names that are our own."""
    names = set(ELSEWHERE)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and on_self(node):
                names.add(node.attr)
    return names


# Torch's even where a class of ours has the same name: on anything but `self` they mean a module or a tensor.
SHARED = {"_buffers", "_parameters", "_base", "_version"}
ALLOWED = {("launch/fork_server.py", "torch._dynamo")}  # it runs before anything of fleetx is imported

BY_NAME = ("getattr", "hasattr", "setattr", "delattr")


def uses(source):
    tree = ast.parse(source)
    roots = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {a.asname or a.name.split(".")[0]: a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            names = [f"{module}.{a.name}" if module else a.name for a in node.names]
            yield from (n for n in names if n.split(".")[0] == "torch" and any(map(private, n.split("."))))
        elif isinstance(node, ast.Attribute) and private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            origin = roots.get(root.id, "") if isinstance(root, ast.Name) else ""
            package = origin.split(".")[0]
            shared = node.attr in SHARED and not on_self(node)
            if package == "torch" or (package in ("", "fleetx") and (shared or node.attr not in ours())):
                yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"torch(\.\w+)*\._\w+(\.\w+)*", node.value):
                yield node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
            name = node.args[1]
            if isinstance(name, ast.Constant) and private(str(name.value)) and name.value not in ours():
                yield ast.unparse(node)


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch.utils import _pytree",
        "from torch.utils._pytree import tree_map",
        "import torch\ntorch._foreach_add_(a, b)",
        "import torch.distributed as dist\ndist.distributed_c10d._world",
        "from torch.utils import checkpoint as c\nc._checkpoint_hook(f)",
        "ddp._check_reducer_finalized()",
        "module._buffers['x']",
        "hasattr(p, '_unsharded_param')",
        "'torch._dynamo' in sys.modules",
    ],
)
def test_every_way_to_use_a_private_name_is_seen(source):
    assert list(uses(source))


def test_only_seams_uses_private_names_of_torch():
    found = {}
    for path in FILES:
        place = path.relative_to(SOURCE).as_posix()
        names = [n for n in uses(path.read_text()) if (place, n) not in ALLOWED]
        if path != HOME and names:
            found[place] = names
    assert not found, "take these from fleetx.base.seams, and say there what they are for"


def test_every_seam_is_used():
    words = {word for p in FILES if p != HOME for word in re.findall(r"\w+", p.read_text())}
    constants = {n for n in vars(seams) if n.isupper() and not private(n)} - {"SEAMS", "SUPPORTED"}
    assert not (constants | {n for n in seams.SEAMS if n.isidentifier()}) - words


# --- versions -------------------------------------------------------------------------------------
def test_the_supported_range_is_that_of_pyproject():
    said = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]["dependencies"]
    (oldest, newest) = ("{}.{}".format(*pair) for pair in seams.SUPPORTED)
    assert f"torch>={oldest},<{newest}" in said


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.14.1", "2.15.0+cu130", "2.15.0a0+git1234"])
def test_a_supported_torch_is_accepted_silently(version):
    seams.check_torch(version)


@pytest.mark.parametrize("version", ["2.12.1+cu126", "1.13.0"])
def test_an_older_torch_is_an_error_that_says_what_to_install(version):
    with pytest.raises(VersionError, match=r"needs torch 2\.13 or newer, but this is .*: pip install 'torch>=2\.13"):
        seams.check_torch(version)


def test_a_newer_torch_warns_once_and_says_what_to_do():
    with pytest.warns(UserWarning, match=r"not tested with torch 2\.16\.0, .* or run `fleetx verify`"):
        seams.check_torch("2.16.0")
    seams.check_torch("2.16.0")
    seams._told.clear()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(("torch", "venv"), [("", ".venv"), ("2.15.0", ".venv-2.15.0")])
def test_make_installs_another_torch_in_a_venv_of_its_own_and_pins_the_rest(torch, venv):
    root = SOURCE.parents[1]
    said = subprocess.run(
        ["make", "-n", "-W", "constraints.txt", "test", f"TORCH={torch}"], cwd=root, capture_output=True, text=True
    ).stdout
    assert f"{venv}/bin/python -m pip install" in said
    assert f"{venv}/bin/python -m pytest" in said
    command = next(line.partition(" > ")[0] for line in said.splitlines() if line.startswith("sed "))
    pins = subprocess.run(command, shell=True, cwd=root, capture_output=True, text=True, check=True).stdout
    before = (root / "constraints.txt").read_text()
    assert pins == (re.sub(r"(?m)^torch==.*", f"torch=={torch}", before) if torch else before)
