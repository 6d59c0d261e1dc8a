"""The last import of the server that test processes are forked from (`forking.forks`)."""

from __future__ import annotations

import atexit
import gc
import os
from pathlib import Path

# The server finds this file by the first entry of PYTHONPATH. Its forks do not need it.
first, _, rest = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
if first == str(Path(__file__).parent):
    del os.environ["PYTHONPATH"]
    if rest:
        os.environ["PYTHONPATH"] = rest

os.environ.pop("FLEETX_TESTS_ROOM", None)
atexit.register(gc.unfreeze)  # triton reports as leaks whatever is frozen at exit
gc.collect()
gc.freeze()  # or the first collection of each fork would write to, and so copy, every page with an imported object
gc.set_threshold(10_000)  # makes collections rarer, too
