"""What `fleetx batch` asks of a script that it starts, passed in an environment variable."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

BRANCH = "FLEETX_BRANCH"  # an Order, as JSON


@dataclass(frozen=True)
class Order:
    """A short run that branches off a checkpoint."""

    merge: int  # factor on the number of steps that the script's own strategy merges
    rate: float  # factor on the script's own learning rate
    steps: int
    output: str  # the file for the losses

    def json(self) -> str:
        return json.dumps(asdict(self))


def ordered() -> Order | None:
    """The order for this run, or None if it is an ordinary run."""
    text = os.environ.get(BRANCH)
    return None if text is None else Order(**json.loads(text))
