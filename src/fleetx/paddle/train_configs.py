"""The few settings that a training script takes from its command line."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def _number(text: str, below: float = math.inf) -> float:
    value = math.nan
    with suppress(ValueError):
        value = float(text)
    if not 0 <= value < below:
        limit = "" if below == math.inf else f" and below {below:g}"
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0{limit}")
    return value


def _decay(text: str) -> float:
    return _number(text, below=1)


def _count(text: str) -> int:
    value = 0
    with suppress(ValueError):
        value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return value


# The names and defaults are Paddle's.
_ARGUMENTS: dict[str, tuple[Callable[[str], Any], Any, str]] = {
    "--lr": (_number, 0.0001, "the learning rate"),
    "--momentum": (_number, 0.9, "of SGD"),
    "--beta1": (_decay, 0.9, "of Adam: decay of the first moment"),
    "--beta2": (_decay, 0.997, "of Adam: decay of the second moment"),
    "--batch_size": (_count, 32, "samples that a worker takes at a time"),
    "--epsilon": (_number, 1e-9, "of Adam: added to the denominator"),
    "--download_config": (str, None, "a yaml file that says where the data is"),
}


def parse_train_configs() -> argparse.Namespace:
    """Read the arguments of the script; one that is unknown or makes no sense ends it with a word why."""
    parser = argparse.ArgumentParser(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, (kind, default, help_) in _ARGUMENTS.items():
        parser.add_argument(name, type=kind, default=default, help=help_)
    configs, others = parser.parse_known_args()
    if others:
        name = next((word for word in others if word.startswith("-")), others[0]).partition("=")[0]
        near = [known for known in _ARGUMENTS if _initials(name) == known or _initials(known) == name]
        near = near or difflib.get_close_matches(name, _ARGUMENTS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        parser.error(f"no argument {name}{hint}: there are {', '.join(_ARGUMENTS)}")
    return configs


def _initials(name: str) -> str:
    """`--lr` of `--learning_rate`."""
    return "--" + "".join(word[:1] for word in re.split("[-_]+", name.lstrip("-")))
