"""`parse_train_configs`: the command line arguments of a training script."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fleetx.base.suggest import did_you_mean


def _number(text: str, below: float = math.inf) -> float:
    value = math.nan
    with suppress(ValueError):
        value = float(text)
    if not 0 <= value < below:
        limit = "" if below == math.inf else f" and below {below:g}"
        raise argparse.ArgumentTypeError(f"{text}: must be a number of at least 0{limit}")
    return value


def _decay(text: str) -> float:
    return _number(text, below=1)


def _count(text: str) -> int:
    value = 0
    with suppress(ValueError):
        value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be an integer of at least 1")
    return value


# Names and defaults are Paddle's.
_ARGUMENTS: dict[str, tuple[Callable[[str], Any], Any, str]] = {
    "--lr": (_number, 0.0001, "learning rate"),
    "--momentum": (_number, 0.9, "momentum of SGD"),
    "--beta1": (_decay, 0.9, "decay rate of the first moment of Adam"),
    "--beta2": (_decay, 0.997, "decay rate of the second moment of Adam"),
    "--batch_size": (_count, 32, "samples per worker and step"),
    "--epsilon": (_number, 1e-9, "added to the denominator of Adam"),
    "--download_config": (str, None, "yaml file that says where the data is"),
}


def parse_train_configs() -> argparse.Namespace:
    """Parse the arguments of the script. An unknown or invalid one ends the script with an error."""
    parser = argparse.ArgumentParser(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, (kind, default, help_) in _ARGUMENTS.items():
        parser.add_argument(name, type=kind, default=default, help=help_)
    configs, others = parser.parse_known_args()
    if others:
        name = next((word for word in others if word.startswith("-")), others[0]).partition("=")[0]
        short = [known for known in _ARGUMENTS if _initials(name) == known or _initials(known) == name]
        hint = f"did you mean {short[0]}?" if short else did_you_mean(name, _ARGUMENTS, quote=False)
        parser.error(
            f"unknown argument {name}{f' ({hint})' if hint else ''}: the arguments are {', '.join(_ARGUMENTS)}"
        )
    return configs


def _initials(name: str) -> str:
    """The initials of a name: `--lr` for `--learning_rate`."""
    return "--" + "".join(word[:1] for word in re.split("[-_]+", name.lstrip("-")))
