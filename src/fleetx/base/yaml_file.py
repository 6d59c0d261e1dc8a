"""YAML as a person expects it: no objects, no duplicate keys, 1e-3 is a number, written beside and renamed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

from fleetx.errors import StrategyError


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(k, deep=True) for k, _ in node.value]
        for key in [k for k in keys if keys.count(k) > 1]:
            said = repr(key) if isinstance(key, str) else f"a key of the type {type(key).__name__}"  # aliases unfold
            raise StrategyError(f"line {node.start_mark.line + 1}: {said} is given more than once")
        return super().construct_mapping(node, deep)


# PyYAML follows YAML 1.1, which reads 1e-3 as a string; people and YAML 1.2 read it as a number.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read(path: str | Path) -> dict[str, Any]:
    """The mapping in the file; an empty file is an empty mapping."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        data = yaml.load(text, _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StrategyError(" ".join(str(error).split())) from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(k, str) for k in data):
        raise StrategyError("must be a mapping of names to values, such as `amp: true`")
    return data


def write(path: str | Path, data: dict[str, Any]) -> None:
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
