"""What is not built yet, as the errors say it: settings beside another strategy, and single settings and models."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from fleetx.errors import NOT_BUILT
from fleetx.strategy.part import every
from fleetx.verify.combinations import declared, refusals, switches

_PLACES = ("fleetx.parts", "fleetx.strategy", "fleetx.optim", "fleetx.base")


def beside_others() -> Iterator[str]:
    """Settings that raise an error together with another strategy, where the switch alone does not."""
    for switch, part in every().items():
        for settings in part.other_examples:
            mine = dict(settings) if part.always else {switch: dict(settings)}
            text = ", ".join(f"{key}={value!r}" for key, value in settings.items())
            for other in switches():
                usual = {} if part.always else declared((switch,))
                if other != switch and not refusals(declared((other,)) | usual):
                    for problem in refusals(declared((other,)) | mine):
                        yield f"{'' if part.always else f'{switch} with '}{text} + {other}: {problem}"


def messages() -> Iterator[str]:
    """Every message in the sources that says so, with <...> for what it inserts."""
    found = set()
    for place in _PLACES:
        spec = importlib.util.find_spec(place)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for path in (p for p in Path(folder).rglob("*.py") if p.name != "compose.py"):  # pairs, listed above
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
