"""What `fleetx batch` tells a script that it starts, in an environment variable."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

BRANCH = "FLEETX_BRANCH"  # an Order, as JSON


@dataclass(frozen=True)
class Order:
    """A short run that branches off a checkpoint."""

    merge: int  # merge so many times the steps of the script's own strategy
    rate: float  # times the script's own rate
    steps: int
    output: str  # the file for the losses

    def json(self) -> str:
        return json.dumps(asdict(self))


def ordered() -> Order | None:
    """None: this is an ordinary run."""
    text = os.environ.get(BRANCH)
    return None if text is None else Order(**json.loads(text))
