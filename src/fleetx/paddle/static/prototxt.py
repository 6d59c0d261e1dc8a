"""A strategy in Protobuf's text format: `name: value`, and `name { ... }` for settings. A repeated name is a list."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fleetx.errors import StrategyError
from fleetx.strategy.part import defaults_of, every

_TOKEN = re.compile(
    r"""\s+|\#[^\n]*|(?P<mark>[:{}])|(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<word>[^\s:{}"'#]+)"""
)


def write(declared: Mapping[str, Any], indent: str = "") -> str:
    lines = []
    for name, value in declared.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{name} {{\n{write(value, indent + '  ')}{indent}}}\n")
        else:
            values = value if isinstance(value, list | tuple) else [] if value is None else [value]
            lines += [f"{indent}{name}: {_written(one)}\n" for one in values]
    return "".join(lines)


def _written(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | str) else repr(value)


def read(text: str) -> dict[str, Any]:
    """Parse the text. The parts determine which fields are lists."""
    tokens = _tokens(text)
    fields = dict(_fields(tokens, nested=False))
    return {name: _with_lists(name, value) for name, value in fields.items()}


def _tokens(text: str) -> Iterator[str]:
    place = 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            raise StrategyError(f"line {text.count(chr(10), 0, place) + 1}: is not Protobuf's text format")
        place = found.end()
        if found.lastgroup:
            yield found[0]


def _fields(tokens: Iterator[str], *, nested: bool) -> Iterator[tuple[str, Any]]:
    fields: dict[str, list[Any]] = {}
    for name in tokens:
        if name == "}" and nested:
            nested = False
            break
        sign = next(tokens, "")
        value = next(tokens, "") if sign == ":" else sign
        if value == "{":
            fields.setdefault(name, []).append(dict(_fields(tokens, nested=True)))
        elif sign != ":" or name in (":", "{", "}") or value in ("", ":", "}"):
            raise StrategyError(f"{name}: must be followed by a value, or by settings in braces")
        else:
            fields.setdefault(name, []).append(_value(name, value))
    if nested:
        raise StrategyError("a closing brace is missing")
    yield from ((name, values[-1] if len(values) == 1 else values) for name, values in fields.items())


def _value(name: str, word: str) -> Any:
    if word in ("true", "false"):
        return word == "true"
    if word[0] in "\"'":
        return json.loads(f'"{word[1:-1]}"') if word[0] == '"' else word[1:-1]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    raise StrategyError(f"{name}: {word!r} is neither a number, true or false, nor a text in quotes")


def _with_lists(name: str, value: Any) -> Any:
    """Make lists of single values where a part expects one: the format writes a list of one like a single value."""
    part = every().get(name.removesuffix("_configs"))
    if part is None or not isinstance(value, dict):
        return value
    lists = {key for key, default in defaults_of(part).items() if isinstance(default, list)}
    return {key: [one] if key in lists and not isinstance(one, list) else one for key, one in value.items()}
