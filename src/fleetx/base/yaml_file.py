"""YAML without surprises: no objects, aliases or duplicate keys, 1e-3 is a number, files are replaced atomically."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from fleetx.base.files import write_atomic
from fleetx.base.suggest import shown
from fleetx.errors import StrategyError

_LONGEST = 1 << 18  # bytes; a strategy has a few hundred, or thousands with long lists of names
_DEEPEST = 20


class _StrictLoader(yaml.SafeLoader):
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        mark: Any = event.start_mark  # the stubs know two classes of marks
        if isinstance(event, yaml.AliasEvent):  # a few lines of them can expand to gigabytes, or contain themselves
            problem = f"the alias *{event.anchor} is not supported: write the value out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        if self._depth > _DEEPEST:
            raise yaml.MarkedYAMLError(problem="nested too deeply for settings", problem_mark=mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in keys:
                problem = f"{shown(key)} is given more than once: remove one of them"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            keys.append(key)
        return super().construct_mapping(node, deep)


# PyYAML follows YAML 1.1, which reads 1e-3 as a string; people and YAML 1.2 read it as a number.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True  # `read` does not accept them


def read_text(path: str | Path, longest: int = _LONGEST) -> str:
    """The text of a file of settings, in YAML or any other format."""
    with open(path, "rb") as file:
        content = file.read(longest + 1)
    if len(content) > longest:
        raise StrategyError(f"is longer than {longest >> 10} KiB, so it is not a file of settings")
    try:
        return content.decode("utf-8-sig")  # sig: Windows editors write a BOM
    except UnicodeDecodeError as error:
        raise StrategyError(f"byte {error.start + 1} is not UTF-8: save the file as UTF-8") from None


def read(path: str | Path) -> dict[str, Any]:
    """Read the mapping in the file; an empty file is an empty mapping."""
    text = read_text(path)
    try:
        data = yaml.load(text, _StrictLoader)
    except yaml.MarkedYAMLError as error:
        raise StrategyError(_located(error)) from None
    except yaml.YAMLError as error:
        raise StrategyError(" ".join(str(error).split())) from None
    except Exception as error:  # PyYAML converts `2001-13-45` and `!!int x` without checking
        raise StrategyError(f"a value cannot be read: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(k, str) for k in data):
        raise StrategyError("must be a mapping of names to values, such as `amp: true`")
    return data


def write(path: str | Path, data: dict[str, Any]) -> None:
    try:
        text = yaml.dump(data, Dumper=_Dumper, sort_keys=False)
    except yaml.YAMLError as error:
        raise StrategyError(f"{path}: {' '.join(str(error).split())}; YAML holds only plain data") from None
    write_atomic(path, text)


def _located(error: yaml.MarkedYAMLError) -> str:
    """Line and column, the problem, and the line with a caret below it."""
    mark = error.problem_mark or error.context_mark
    text = ", ".join(filter(None, [error.context, error.problem]))
    return f"line {mark.line + 1}, column {mark.column + 1}: {text}\n{mark.get_snippet()}" if mark else text
