"""YAML without surprises: no objects, no duplicate keys, 1e-3 is a number, and files are replaced atomically."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from fleetx.base.files import write_atomic
from fleetx.errors import StrategyError


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in keys:
                # Only the type of other keys: an alias can expand to gigabytes.
                name = repr(key) if isinstance(key, str) else f"a key of type {type(key).__name__}"
                problem = f"{name} is given more than once: remove one of them"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            keys.append(key)
        return super().construct_mapping(node, deep)


# PyYAML follows YAML 1.1, which reads 1e-3 as a string; people and YAML 1.2 read it as a number.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read(path: str | Path) -> dict[str, Any]:
    """Read the mapping in the file; an empty file is an empty mapping."""
    try:
        data = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except yaml.MarkedYAMLError as error:
        raise StrategyError(_located(error)) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StrategyError(" ".join(str(error).split())) from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(k, str) for k in data):
        raise StrategyError("must be a mapping of names to values, such as `amp: true`")
    return data


def write(path: str | Path, data: dict[str, Any]) -> None:
    write_atomic(path, yaml.safe_dump(data, sort_keys=False))


def _located(error: yaml.MarkedYAMLError) -> str:
    """Line and column, the problem, and the line with a caret below it."""
    mark = error.problem_mark or error.context_mark
    text = ", ".join(filter(None, [error.context, error.problem]))
    return f"line {mark.line + 1}, column {mark.column + 1}: {text}\n{mark.get_snippet()}" if mark else text
