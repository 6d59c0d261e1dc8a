"""`fleetx import`: convert a DeepSpeed, Accelerate or Paddle file to a strategy. Files are read as plain data only."""

from __future__ import annotations

from pathlib import Path

from fleetx.base import yaml_file
from fleetx.errors import StrategyError
from fleetx.integrations import accelerate, deepspeed
from fleetx.integrations.imported import LONGEST, Imported, read_json
from fleetx.paddle.static import prototxt


def read(path: Path, ranks: int | None = None) -> Imported:
    """The suffix determines the kind of file: .json, .yaml or .prototxt."""
    try:
        suffix = path.suffix.lower()
        if suffix == ".json":
            found = deepspeed.read(read_json(path), ranks)
        elif suffix in (".yaml", ".yml"):
            found = accelerate.read(yaml_file.read(path), path.parent)
        elif suffix in (".prototxt", ".pbtxt"):
            found = _paddle(yaml_file.read_text(path, LONGEST))
        else:
            raise StrategyError(
                f"the suffix {suffix!r} is unknown: give a .json of DeepSpeed, a .yaml of Accelerate or a .prototxt of "
                "Paddle"
            )
        found.strategy.plan()
    except StrategyError as error:
        raise StrategyError([f"{path}: {problem}" for problem in error.problems]) from None
    except (TypeError, ValueError, AttributeError) as error:
        raise StrategyError(f"{path}: a value has the wrong type: {error}") from None
    return found


def _paddle(text: str) -> Imported:
    found = Imported("Paddle")
    declared = prototxt.read(text)
    for name, value in declared.items():
        switch = name.removesuffix("_configs")
        if name != switch and not declared.get(switch):
            found.ignored.append(f"{name}: {switch} is off")
            continue
        try:
            setattr(found.strategy, name, value)
        except StrategyError as error:
            found.missing += error.problems
    found.missing += [f"{name}: {reason}" for name, reason in found.strategy.without_meaning()]
    return found
