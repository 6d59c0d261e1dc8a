"""Which combinations of strategies there are, how each is declared, and what the errors say is not supported yet."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fleetx.errors import NOT_BUILT, StrategyError, may_be_built
from fleetx.strategy import DistributedStrategy
from fleetx.strategy.part import Part, claims, defaults_of, every

Switches = tuple[str, ...]
_SOURCES = ("fleetx.parts", "fleetx.strategy", "fleetx.optim", "fleetx.base")  # packages that raise errors


def switches() -> list[str]:
    """Every switch of a strategy that is built and not always on."""
    return [name for name, part in every().items() if claims(part) and not part.always]


def combinations(largest: int, among: Sequence[str] = ()) -> Iterator[Switches]:
    """Nothing, single strategies, pairs, triples ... of these switches, by default of all."""
    for size in range(largest + 1):
        yield from itertools.combinations(among or switches(), size)


def parts(chosen: Switches, *, lossless: bool = False) -> dict[str, Part]:
    """These strategies, with settings that make their effects visible on verify's model, adjusted to each other."""
    alone = {}
    for switch in chosen:
        kind = every()[switch]
        alone[switch] = kind(**(dict(kind.example) | dict((kind.lossless or {}) if lossless else {})))
    return {switch: part.adapted_to(alone.values()) for switch, part in alone.items()}


def declared(chosen: Switches, full: Switches = (), *, lossless: bool = False) -> dict[str, Any]:
    """The arguments of DistributedStrategy. full: a larger combination to take the settings from."""
    acting = parts(full or chosen, lossless=lossless)
    out: dict[str, Any] = {}
    for switch in chosen:
        part, defaults = acting[switch], defaults_of(every()[switch])
        own = {key: getattr(part, key) for key in defaults if getattr(part, key) != defaults[key]}
        names = {field: name for name, field in part.flat.items()}
        out |= {switch: True} | {names[k]: v for k, v in own.items()} if names else {switch: own or True}
    return out


def conflicts_of(strategy: dict[str, Any]) -> list[str]:
    """Why these strategies do not work together; empty if they do."""
    try:
        DistributedStrategy(**strategy).plan()
    except StrategyError as error:
        return error.problems
    return []


def kind_of(problems: Sequence[str]) -> str:
    """Whether the problems are a contradiction ("refused"), or only not supported yet ("unbuilt")."""
    return "unbuilt" if all(may_be_built(problem) for problem in problems) else "refused"


# --- what is not supported yet --------------------------------------------------------------------
def unbuilt_beside_others() -> Iterator[str]:
    """Settings that raise an error with another strategy, although the switch itself works with it."""
    for switch, part in every().items():
        for settings in part.other_examples:
            mine = dict(settings) if part.always else {switch: dict(settings)}
            text = ", ".join(f"{key}={value!r}" for key, value in settings.items())
            for other in switches():
                usual = {} if part.always else declared((switch,))
                if other != switch and not conflicts_of(declared((other,)) | usual):
                    for problem in conflicts_of(declared((other,)) | mine):
                        yield f"{'' if part.always else f'{switch} with '}{text} + {other}: {problem}"


def unbuilt_messages() -> Iterator[str]:
    """Every message in the sources that says "is not supported yet", with <...> for inserted values."""
    found = set()
    for place in _SOURCES:
        spec = importlib.util.find_spec(place)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for path in Path(folder).rglob("*.py"):
                found |= {
                    " ".join(_text(node).split())
                    for node in ast.walk(ast.parse(path.read_text()))
                    if isinstance(node, ast.JoinedStr) and _names(node)
                }
    return iter(sorted(found))


def _names(node: ast.JoinedStr) -> bool:
    return any(isinstance(v, ast.FormattedValue) and ast.unparse(v.value) == "NOT_BUILT" for v in node.values)


def _text(node: ast.JoinedStr) -> str:
    out = ""
    for value in node.values:
        if isinstance(value, ast.FormattedValue):
            name = ast.unparse(value.value)
            out += NOT_BUILT if name == "NOT_BUILT" else f"`<{re.findall('[a-z_]+', name)[-1].strip('_')}>`"
        elif isinstance(value, ast.Constant):
            out += str(value.value)
    return out
