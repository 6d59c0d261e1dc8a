"""Learning-rate schedules for large batches. The code is in `fleetx.optim.schedule`."""

from fleetx.optim.schedule import *  # noqa: F403
from fleetx.optim.schedule import __all__ as __all__
