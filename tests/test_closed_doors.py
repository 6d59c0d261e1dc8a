"""Nothing in our source runs code that comes from outside: read with `ast`, not with a regular expression."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml

import fleetx
from fleetx.base import yaml_file

ROOT = Path(fleetx.__file__).parents[2]
FILES = sorted(path for folder in ("src", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))

# file -> (what it does, why that is no door)
ALLOWED = {
    "src/fleetx/launch/runner.py": ({"exec"}, "it runs the user's script: that is its purpose"),
    "src/fleetx/verify/ranks.py": ({"torch.load"}, "a pipe from a child process of its own"),
    "src/fleetx/base/yaml_file.py": ({"yaml.load"}, "its loader is a yaml.SafeLoader; a test below looks"),
    "benchmarks/frame/rank.py": ({"pickle.loads"}, "a private folder, shared with its parent process only"),
    "benchmarks/frame/ranks.py": ({"pickle.loads"}, "a private folder, shared with its child processes only"),
    "benchmarks/large_batch/worker.py": ({"broadcast_object_list"}, "workers of one machine, on loopback"),
    "benchmarks/slow_network/islands/diloco.py": ({"all_gather_object"}, "workers of one machine, in namespaces"),
}

PICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
OBJECTS = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip


def names_of(tree: ast.AST) -> dict[str, str]:
    """What a name in this file stands for: `from pickle import loads as x` -> {"x": "pickle.loads"}."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, names)}.{node.attr}"
    return "?"


def keyword(call: ast.Call, name: str) -> object:
    """The constant value of a keyword; `...` if it is not a constant, None if it is missing."""
    for given in call.keywords:
        if given.arg == name:
            return given.value.value if isinstance(given.value, ast.Constant) else ...
    return None


def danger(call: ast.Call, names: dict[str, str]) -> str | None:
    name = dotted(call.func, names)
    module, _, last = name.rpartition(".")
    if module in PICKLERS and last in ("load", "loads", "Unpickler", "open"):
        return f"{module}.{last}"
    if name in ("eval", "exec", "builtins.eval", "builtins.exec"):
        return last
    if name == "torch.load" and keyword(call, "weights_only") is not True:
        return "torch.load"
    if module == "yaml" and "load" in last and not last.startswith("safe_load"):
        return name
    if keyword(call, "shell") not in (None, False) or name in ("os.system", "os.popen"):
        return "shell=True"
    if last in OBJECTS or last.startswith(("rpc_", "rpc_sync")):
        return last
    if keyword(call, "allow_pickle") not in (None, False) or keyword(call, "trust_remote_code") not in (None, False):
        return "allow_pickle"
    return None


def dangers(source: str) -> set[str]:
    tree = ast.parse(source)
    names = names_of(tree)
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {found for call in calls if (found := danger(call, names))}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle; pickle.load(f)",
        "from pickle import loads as read; read(x)",
        "import pickle as p; p.Unpickler(f).load()",
        "import torch; torch.load(f)",
        "import torch as t; t.load(f, weights_only=False)",
        "from torch import load; load(f, weights_only=flag)",
        "import yaml; yaml.load(f, Loader=yaml.Loader)",
        "eval('1')",
        "exec(code)",
        "import subprocess; subprocess.run('ls', shell=True)",
        "import os; os.system('ls')",
        "import torch.distributed as dist; dist.all_gather_object(out, x)",
        "from torch.distributed import broadcast_object_list; broadcast_object_list([x])",
        "import numpy as np; np.load(f, allow_pickle=True)",
    ],
)
def test_every_door_is_seen(source):
    assert dangers(source)


@pytest.mark.parametrize(
    "source",
    ["import torch; torch.load(f, weights_only=True)", "import yaml; yaml.safe_load(f)", "model.eval()", "json.load(f)",
     "re.compile(x).match(y)", "import subprocess; subprocess.run(['ls'])", "pickle.dumps(x)"],
)  # fmt: skip
def test_harmless_calls_are_not_taken_for_doors(source):
    assert not dangers(source)


def test_all_our_source_is_read():
    assert len(FILES) > 200
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == {"src", "benchmarks", "examples"}


def test_there_is_no_door_in_our_source():
    found = {str(path.relative_to(ROOT)): doors for path in FILES if (doors := dangers(path.read_text()))}
    assert found == {file: doors for file, (doors, _) in ALLOWED.items()}


def test_our_yaml_loader_is_a_safe_one():
    assert issubclass(yaml_file._StrictLoader, yaml.SafeLoader)
